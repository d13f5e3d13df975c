// OpenAI's answers, against literal texts.
#include "server/openai/openai_answer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/status.h"
#include "tests/server/openai/letter_model.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

// A prompt's session in the making: what it tells of prompt `ids`, and of candidates.
class Told {
 public:
  Told(OpenAiRequest request, std::vector<int32_t> ids)
      : request_(std::move(request)), answer_(Model(), request_, "id", 5) {
    spec_.prompt = std::move(ids);
  }
  OpenAiAnswer& answer() { return answer_; }
  void Prompt(std::vector<TokenDetail> details = {}) {
    const SessionEvent::Prompt prompt{spec_, details};
    SessionEvent event;
    event.prompt = &prompt;
    answer_.Add(0, event);
  }
  void Output(const OutputPart& part) {
    SessionEvent event;
    event.output = &part;
    answer_.Add(0, event);
  }

 private:
  const OpenAiRequest request_;
  OpenAiAnswer answer_;
  RequestSpec spec_;
};

TokenDetail Detail(float logprob, std::vector<TokenLogprob> top) {
  return {.logprob = logprob, .top = std::move(top)};
}

const char kHead[] = R"({"id":"id","object":"text_completion","created":5,"model":"m",)"
                     R"("system_fingerprint":"fp_1","choices":[)";

TEST(OpenAiAnswer, AWholeCompletionWithEverything) {
  Told told(ReadGood(false, R"({"prompt": [0, 1], "n": 2, "logprobs": 1, "echo": true,
                                "return_token_ids": true, "prompt_logprobs": 1})"),
            {0, 1});
  told.Prompt({Detail(-0.5, {{2, -0.25}})});
  told.Output({.candidate = 1,
               .text = "d",
               .token_ids = {3, 49},
               .details = {Detail(-1, {{3, -1}}), Detail(-INFINITY, {{4, -0.125}})},
               .finish = FinishReason::kEndToken,
               .stop_token = 49});
  told.Output({.text = "\"",
               .token_ids = {5},
               .details = {Detail(-2, {{6, -0.1f}})},
               .finish = FinishReason::kStopString,
               .stop_string = "x"});
  const std::string prompt = R"("prompt_token_ids":[0,1],"prompt_logprobs":[null,{)"
                             R"("2":{"logprob":-0.25,"rank":1,"decoded_token":"c"},)"
                             R"("1":{"logprob":-0.5,"rank":null,"decoded_token":"b"}}])";
  EXPECT_EQ(
      told.answer().Whole(),
      kHead +
          std::string(
              R"({"index":0,"text":"ab\"","logprobs":{"tokens":["a","b","f"],)"
              R"("token_logprobs":[null,-0.5,-2],)"
              R"("top_logprobs":[null,{"c":-0.25,"b":-0.5},{"g":-0.1,"f":-2}],)"
              R"("text_offset":[0,1,2]},"finish_reason":"stop","stop_reason":"x","token_ids":[5],)") +
          prompt +
          R"(},{"index":1,"text":"abd","logprobs":{"tokens":["a","b","d","xx"],)"
          R"("token_logprobs":[null,-0.5,-1,-9999],)"
          R"("top_logprobs":[null,{"c":-0.25,"b":-0.5},{"d":-1},{"e":-0.125,"xx":-9999}],)"
          R"("text_offset":[0,1,2,3]},"finish_reason":"stop","stop_reason":null,)"
          R"("token_ids":[3,49],)" +
          prompt +
          R"(}],"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5,)"
          R"("prompt_tokens_details":{"cached_tokens":0}}})");
}

TEST(OpenAiAnswer, APromptAloneIsScored) {
  Told told(ReadGood(false, R"({"prompt": [0, 1], "max_tokens": 0, "logprobs": 0, "echo": true})"),
            {0, 1});
  told.Prompt({Detail(-0.5, {})});
  told.Output({.text = "z",
               .token_ids = {7},
               .details = {Detail(-1, {})},
               .finish = FinishReason::kEndToken,
               .stop_token = 7});
  EXPECT_EQ(told.answer().Whole(),
            std::string(kHead) +
                R"({"index":0,"text":"ab","logprobs":{"tokens":["a","b"],)"
                R"("token_logprobs":[null,-0.5],"top_logprobs":[null,{"b":-0.5}],)"
                R"("text_offset":[0,1]},"finish_reason":"length","stop_reason":null}],)"
                R"("usage":{"prompt_tokens":2,"completion_tokens":0,"total_tokens":2,)"
                R"("prompt_tokens_details":{"cached_tokens":0}}})");
}

TEST(OpenAiAnswer, AWholeChat) {
  Told told(ReadGood(true, R"({"messages": [{"role": "user", "content": "a"}], "logprobs": true,
                               "top_logprobs": 1})"),
            {0});
  told.Prompt();
  told.Output({.text = "bb",
               .token_ids = {27},
               .details = {Detail(-1.5, {{1, -0.5}})},
               .finish = FinishReason::kLength});
  EXPECT_EQ(told.answer().Whole(),
            R"({"id":"id","object":"chat.completion","created":5,"model":"m",)"
            R"("system_fingerprint":"fp_1","choices":[{"index":0,"message":{"role":"assistant",)"
            R"("content":"bb","refusal":null},"logprobs":{"content":[{"token":"bb",)"
            R"("logprob":-1.5,"bytes":[98,98],"top_logprobs":[{"token":"b","logprob":-0.5,)"
            R"("bytes":[98]}]}],"refusal":null},"finish_reason":"length","stop_reason":null}],)"
            R"("usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2,)"
            R"("prompt_tokens_details":{"cached_tokens":0}}})");
}

TEST(OpenAiAnswer, AStreamedChat) {
  Told told(ReadGood(true, R"({"messages": [{"role": "user", "content": "a"}], "stream": true,
                               "stream_options": {"include_usage": true}})"),
            {0});
  const std::string head = R"(data: {"id":"id","object":"chat.completion.chunk","created":5,)"
                           R"("model":"m","system_fingerprint":"fp_1","choices":[)";
  const auto chunk = [&](const std::string& delta, const std::string& finish = "null") {
    return head + R"({"index":0,"delta":)" + delta + R"(,"logprobs":null,"finish_reason":)" +
           finish + R"(}],"usage":null})" + "\n\n";
  };
  told.Prompt();
  told.Output({.text = "", .token_ids = {1}});  // held back
  EXPECT_EQ(told.answer().TakeEvents(), chunk(R"({"role":"assistant","content":""})"));
  told.Output({.text = "", .token_ids = {1}});
  EXPECT_EQ(told.answer().TakeEvents(), "");
  told.Output({.text = "bb\n", .token_ids = {1}});
  EXPECT_EQ(told.answer().TakeEvents(), chunk(R"({"content":"bb\n"})"));
  told.Output(
      {.text = "c", .token_ids = {2, 49}, .finish = FinishReason::kEndToken, .stop_token = 49});
  EXPECT_EQ(told.answer().TakeEvents(),
            chunk(R"({"content":"c"})") + chunk("{}", R"("stop","stop_reason":null)"));
  EXPECT_EQ(told.answer().LastEvents(),
            head +
                R"(],"usage":{"prompt_tokens":1,"completion_tokens":5,"total_tokens":6,)"
                R"("prompt_tokens_details":{"cached_tokens":0}}})" +
                "\n\ndata: [DONE]\n\n");
}

// The characters at which Python's str.splitlines splits, by which some clients read streams
// (https://docs.python.org/3/library/stdtypes.html#str.splitlines).
TEST(OpenAiAnswer, AnEventIsOneLineForReadersOfUnicode) {
  const std::string all = "a\n\r\v\f\x1c\x1d\x1e\u0085\u2028\u2029z\u2027\u00c2\u2030";
  Told told(ReadGood(true, R"({"messages": [{"role": "user", "content": "a"}], "stream": true})"),
            {0});
  told.Prompt();
  told.Output({.text = all, .token_ids = {1}});
  const std::string events = told.answer().TakeEvents();
  const std::string content =
      R"("delta":{"content":"a\n\r\u000b\f\u001c\u001d\u001e\u0085\u2028\u2029z)"
      "\u2027\u00c2\u2030\"}";
  EXPECT_THAT(events, HasSubstr(content));
  const size_t at = events.find("data: {", 1);
  const Json event = Json::parse(events.substr(at + 6, events.size() - at - 8));
  EXPECT_EQ(event["choices"][0]["delta"]["content"], all);
}

TEST(OpenAiAnswer, AStreamedCompletionOfSeveral) {
  Told told(ReadGood(false, R"({"prompt": "ab", "n": 2, "stream": true, "echo": true,
                                "logprobs": 0, "return_token_ids": true,
                                "stream_options": {"continuous_usage_stats": true}})"),
            {0, 1});
  const auto chunk = [&](const std::string& rest, int tokens) {
    return Str("data: ", kHead, rest, R"(}],"usage":{"prompt_tokens":2,"completion_tokens":)",
               tokens, R"(,"total_tokens":)", 2 + tokens,
               R"(,"prompt_tokens_details":{"cached_tokens":0}}})", "\n\n");
  };
  const std::string echo =
      R"("text":"ab","logprobs":{"tokens":["a","b"],"token_logprobs":[null,-1],)"
      R"("top_logprobs":[null,{"b":-1}],"text_offset":[0,1]},"finish_reason":null,)"
      R"("token_ids":[],"prompt_token_ids":[0,1])";
  told.Prompt({Detail(-1, {})});
  EXPECT_EQ(told.answer().TakeEvents(),
            chunk(R"({"index":0,)" + echo, 0) + chunk(R"({"index":1,)" + echo, 0));
  told.Output({.candidate = 1,
               .text = "c",
               .token_ids = {2},
               .details = {Detail(-2, {})},
               .finish = FinishReason::kLength});
  EXPECT_EQ(told.answer().TakeEvents(),
            chunk(R"({"index":1,"text":"c","logprobs":{"tokens":["c"],"token_logprobs":[-2],)"
                  R"("top_logprobs":[{"c":-2}],"text_offset":[2]},"finish_reason":null,)"
                  R"("token_ids":[2])",
                  1) +
                chunk(R"({"index":1,"text":"","logprobs":null,"finish_reason":"length",)"
                      R"("stop_reason":null,"token_ids":[])",
                      1));
  EXPECT_EQ(told.answer().LastEvents(), "data: [DONE]\n\n");
}

}  // namespace
}  // namespace treadle
