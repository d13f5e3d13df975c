// OpenAI's API over real sockets, beside gRPC's: the same answers, the same limits.
#include "server/openai/openai_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "base/status.h"
#include "base/version.h"
#include "server/grpc/messages.h"
#include "tests/server/openai/openai_client.h"
#include "tests/server/without_xgrammar.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;
using testing::HasSubstr;

const char kTemplate[] = "{% for m in messages %}{{ m.content }}{% endfor %}";

using Answer = HttpExchange;

std::vector<int32_t> Ids(const Json& array) { return array.get<std::vector<int32_t>>(); }
std::vector<int32_t> Ids(const v1::Output& output) {
  return {output.token_ids().begin(), output.token_ids().end()};
}

// A stream's choices, put together.
Json Joined(const std::vector<Json>& events) {
  Json choices = Json::array();
  for (const Json& event : events) {
    if (!event.is_object() || event["choices"].empty()) continue;
    const Json& piece = event["choices"][0];
    Json& choice = choices[piece["index"].get<size_t>()];
    if (choice.is_null()) {
      choice = {{"index", piece["index"]}, {"text", ""}, {"token_ids", Json::array()}};
      choice["logprobs"]["token_logprobs"] = Json::array();
    }
    choice["text"] = choice["text"].get<std::string>() + piece["text"].get<std::string>();
    for (const Json& id : piece["token_ids"]) choice["token_ids"].push_back(id);
    if (!piece["logprobs"].is_null()) {
      for (const Json& value : piece["logprobs"]["token_logprobs"]) {
        choice["logprobs"]["token_logprobs"].push_back(value);
      }
    }
    choice["finish_reason"] = piece["finish_reason"];
  }
  return choices;
}

TEST(OpenAiServer, SaysWhatItServes) {
  TestServer server;
  const Json models = Get(server, "/v1/models").body;
  EXPECT_EQ(models["object"], "list");
  EXPECT_EQ(models["data"][0]["id"], "prefix");
  EXPECT_EQ(models["data"][0]["max_model_len"], 1024);
  EXPECT_EQ(models["data"][0]["vocab_size"], TestServer::kVocab);
  EXPECT_EQ(models["data"][0]["sampling_defaults"], nullptr);
  EXPECT_EQ(Get(server, "/v1/models/prefix").body, models["data"][0]);
  EXPECT_EQ(Get(server, "/version").body["version"], kVersion);
  EXPECT_EQ(Get(server, "/health").code, 200);
  EXPECT_TRUE(server.WaitHealth("ready", true));
  EXPECT_EQ(Get(server, "/ready").code, 200);
  const Answer none = Get(server, "/v1/none");
  EXPECT_EQ(none.code, 404);
  EXPECT_EQ(none.body["error"]["message"], "there is no /v1/none");
  const Answer wrong = Get(server, kChat);
  EXPECT_EQ(wrong.code, 405);
  EXPECT_THAT(wrong.head, HasSubstr("Allow: POST\r\n"));
  server.server().DrainAndStop(milliseconds(0));
  EXPECT_EQ(Get(server, "/ready").code, 503);
}

TEST(OpenAiServer, AModelMayHaveSeveralNames) {
  TestServer server({.names = {"org/first", "second"}});
  const Json models = Get(server, "/v1/models").body["data"];
  ASSERT_EQ(models.size(), 2u);
  EXPECT_EQ(models[0]["id"], "org/first");
  EXPECT_EQ(models[1]["id"], "second");
  for (const char* path : {"org/first", "org%2Ffirst", "second"}) {
    EXPECT_EQ(Get(server, Str("/v1/models/", path)).code, 200) << path;
  }
  for (const char* name : {"org/first", "second"}) {
    const Answer answer =
        Post(server, "/v1/completions",
             Str(R"({"model": ")", name, R"(", "prompt": [1], "max_tokens": 1})"));
    EXPECT_EQ(answer.code, 200) << answer.body;
    EXPECT_EQ(answer.body["model"], "org/first");
  }
  const Answer other = Post(server, "/v1/completions", R"({"model": "prefix", "prompt": [1]})");
  EXPECT_EQ(other.code, 404);
  EXPECT_THAT(other.body["error"]["message"].get<std::string>(),
              HasSubstr(R"("prefix" does not exist, expected "org/first" or "second")"));
  grpc::ClientContext context;
  v1::GetModelInfoResponse info;
  ASSERT_TRUE(server.stub().GetModelInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.name(), "org/first");
  EXPECT_THAT(info.names(), testing::ElementsAre("org/first", "second"));
}

// The same answer to a request that leaves out what the model recommends and to one that says it,
// over each front end.
TEST(OpenAiServer, RequestsThatSayNothingSampleAsTheModelRecommends) {
  TestServer server({.sampling_defaults = SamplingParameters{.temperature = 0.5f, .top_k = 3}});
  const Json shown = {{"temperature", 0.5}, {"top_k", 3}};
  EXPECT_EQ(Get(server, "/v1/models").body["data"][0]["sampling_defaults"], shown);
  grpc::ClientContext context;
  v1::GetModelInfoResponse info;
  ASSERT_TRUE(server.stub().GetModelInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.sampling_defaults().temperature(), 0.5f);
  EXPECT_EQ(info.sampling_defaults().top_k(), 3);
  EXPECT_FALSE(info.sampling_defaults().has_top_p());

  v1::GenerateRequest request = MakeRequest("r", 1, 10, 20);
  request.mutable_sampling()->Clear();
  request.mutable_sampling()->set_seed(7);
  const auto grpc_answer = [&] {
    v1::GenerateResponse response;
    EXPECT_TRUE(Generate(server, request, response).ok());
    return Ids(response.output());
  };
  const std::vector<int32_t> ids(request.token_ids().ids().begin(),
                                 request.token_ids().ids().end());
  const auto http_answer = [&](const Json& more) {
    Json body = {{"prompt", ids},
                 {"max_tokens", 20},
                 {"seed", 7},
                 {"return_token_ids", true},
                 {"ignore_eos", true}};
    body.update(more);
    return Ids(Post(server, kCompletions, body.dump()).body["choices"][0]["token_ids"]);
  };
  const std::vector<int32_t> absent = grpc_answer();
  EXPECT_EQ(http_answer(Json::object()), absent);
  EXPECT_EQ(http_answer(shown), absent);
  EXPECT_NE(http_answer({{"temperature", 1}, {"top_k", 0}}), absent);
  request.mutable_sampling()->set_temperature(0);
  const std::vector<int32_t> greedy = grpc_answer();
  EXPECT_EQ(http_answer({{"temperature", 0}, {"top_k", 0}}), greedy);
  EXPECT_NE(greedy, absent);
}

TEST(OpenAiServer, AnswersAreThoseOfGrpc) {
  TestServer server;
  v1::GenerateRequest request = MakeRequest("a", 3, 20, 12);
  request.mutable_sampling()->set_num_candidates(3);
  request.mutable_sampling()->set_temperature(1.5);
  request.mutable_sampling()->set_top_k(20);
  request.mutable_response()->set_logprobs(2);
  v1::GenerateResponse expected;
  ASSERT_TRUE(Generate(server, request, expected).ok());
  Json body = {{"prompt", request.token_ids().ids()},
               {"seed", 3},
               {"n", 3},
               {"temperature", 1.5},
               {"top_k", 20},
               {"logprobs", 2},
               {"max_tokens", 12},
               {"ignore_eos", true},
               {"return_token_ids", true}};
  const auto check = [&](const Json& choices) {
    ASSERT_EQ(choices.size(), 3u);
    for (uint32_t c = 0; c < 3; ++c) {
      const v1::Output& output = CandidateIn(c, expected);
      EXPECT_EQ(choices[c]["index"], c);
      EXPECT_EQ(Ids(choices[c]["token_ids"]), Ids(output));
      EXPECT_EQ(choices[c]["text"], output.text());
      EXPECT_EQ(choices[c]["finish_reason"], "length");
      const Json& logprobs = choices[c]["logprobs"]["token_logprobs"];
      ASSERT_EQ(logprobs.size(), 12u);
      for (int i = 0; i < 12; ++i) {
        EXPECT_EQ(logprobs[static_cast<size_t>(i)].get<float>(), output.logprobs(i).logprob());
      }
    }
  };
  const Answer whole = Post(server, kCompletions, body.dump());
  ASSERT_EQ(whole.code, 200) << whole.body;
  check(whole.body["choices"]);
  EXPECT_EQ(whole.body["system_fingerprint"], "fp_0123456789");
  EXPECT_EQ(whole.body["usage"], Json({{"prompt_tokens", 20},
                                       {"completion_tokens", 36},
                                       {"total_tokens", 56},
                                       {"prompt_tokens_details", {{"cached_tokens", 16}}}}))
      << "a page of them, which gRPC's request left";

  // In pieces, put together.
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  const std::vector<Json> events = Stream(server, kCompletions, body.dump());
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events.back(), "[DONE]");
  EXPECT_EQ(events[events.size() - 2]["usage"], whole.body["usage"]);
  check(Joined(events));
}

// Whatever the seed, at a temperature that makes a draw of it, and with others in the batch.
TEST(OpenAiServer, AnswersLookAsTheyMust) {
  TestServer server;
  v1::GenerateRequest request = MakeRequest("a", 1, 5, 12);
  request.mutable_sampling()->set_temperature(1.5);
  request.mutable_sampling()->set_num_candidates(4);
  request.mutable_stopping()->set_ignore_eos(false);
  request.mutable_constraint()->set_regex("(ab|b{2}){1,3}c?");
  Json body = {{"prompt", request.token_ids().ids()},
               {"temperature", 1.5},
               {"n", 4},
               {"max_tokens", 12},
               {"structured_outputs", {{"regex", "(ab|b{2}){1,3}c?"}}}};
  std::set<std::string> texts;
  for (uint64_t seed = 1; seed < 20; ++seed) {
    request.mutable_sampling()->set_seed(seed);
    body["seed"] = seed;
    v1::GenerateResponse expected;
    const grpc::Status status = Generate(server, request, expected);
    if (IsWithoutXGrammar(status.error_message())) GTEST_SKIP() << kWithoutXGrammar;
    ASSERT_TRUE(status.ok()) << status.error_message();
    const Answer answer = Post(server, kCompletions, body.dump());
    ASSERT_EQ(answer.code, 200) << answer.body;
    for (uint32_t c = 0; c < 4; ++c) {
      const v1::Output& output = CandidateIn(c, expected);
      EXPECT_EQ(output.finish_info().reason(), v1::FINISH_REASON_STOP);
      EXPECT_TRUE(std::regex_match(output.text(), std::regex("(ab|bb){1,3}c?"))) << output.text();
      EXPECT_EQ(answer.body["choices"][c]["text"], output.text());
      texts.insert(output.text());
    }
  }
  EXPECT_GT(texts.size(), 5u);
}

TEST(OpenAiServer, AChatStreamsItsRoleItsTextAndItsEnd) {
  TestServer server({.chat_template = kTemplate});
  v1::GenerateRequest request = MakeRequest("a", 5, 1, 9);
  *request.mutable_chat()->add_messages()->mutable_content() = "hello";
  request.mutable_chat()->mutable_messages(0)->set_role("user");
  v1::GenerateResponse expected;
  ASSERT_TRUE(Generate(server, request, expected).ok());
  const std::string body =
      R"({"model": "prefix", "messages": [{"role": "user", "content": "hello"}],
      "seed": 5, "max_completion_tokens": 9, "ignore_eos": true, "stream": )";
  const std::vector<Json> events = Stream(server, kChat, body + "true}");
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events[0]["choices"][0]["delta"], Json({{"role", "assistant"}, {"content", ""}}));
  std::string text;
  for (size_t i = 1; i + 2 < events.size(); ++i) {
    text += events[i]["choices"][0]["delta"]["content"].get<std::string>();
  }
  EXPECT_EQ(text, expected.output().text());
  EXPECT_EQ(events[events.size() - 2]["choices"][0]["delta"], Json::object());
  EXPECT_EQ(events[events.size() - 2]["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(events.back(), "[DONE]");
  const Answer whole = Post(server, kChat, body + "false}");
  EXPECT_EQ(whole.body["choices"][0]["message"]["content"], expected.output().text());
}

TEST(OpenAiServer, SeveralPromptsAreOneAnswer) {
  TestServer server;
  const auto body = [](const char* prompt, const char* more) {
    return Str(R"({"temperature": 0, "max_tokens": 4, "ignore_eos": true, "prompt": )", prompt,
               more, "}");
  };
  const Json both = Post(server, kCompletions, body(R"(["abc", "xyz"])", "")).body;
  ASSERT_EQ(both["choices"].size(), 2u) << both;
  for (int i = 0; i < 2; ++i) {
    const Json one = Post(server, kCompletions, body(i == 0 ? R"("abc")" : R"("xyz")", "")).body;
    EXPECT_EQ(both["choices"][i]["text"], one["choices"][0]["text"]);
  }
  EXPECT_EQ(both["usage"]["prompt_tokens"], 6);
  EXPECT_EQ(both["usage"]["completion_tokens"], 8);
  const std::vector<Json> events =
      Stream(server, kCompletions, body(R"(["abc", "xyz"])", R"(, "stream": true)"));
  std::string texts[2];
  for (const Json& event : events) {
    if (!event.is_object()) continue;
    const Json& choice = event["choices"][0];
    texts[choice["index"].get<int>()] += choice["text"].get<std::string>();
  }
  EXPECT_EQ(both["choices"][0]["text"], texts[0]);
  EXPECT_EQ(both["choices"][1]["text"], texts[1]);
  // One that is wrong is the call's error, and holds nothing.
  const Answer bad = Post(server, kCompletions, body(R"(["abc", "x1"])", ""));
  EXPECT_EQ(bad.code, 400);
  EXPECT_EQ(bad.body["error"]["message"], "prompt: '1' is no letter, expected a to z");
  EXPECT_TRUE(
      server.WaitLoad([](const auto& load) { return load.running() == 0 && load.waiting() == 0; }));
}

TEST(OpenAiServer, AScoredPromptHasItsLogProbabilities) {
  TestServer server;
  v1::GenerateRequest request = MakeRequest("a", 3, 10, 1);
  request.mutable_response()->set_prompt_logprobs(1);
  v1::GenerateResponse expected;
  ASSERT_TRUE(Generate(server, request, expected).ok());
  for (const int most : {0, 1}) {
    const Json body = {{"prompt", {request.token_ids().ids()}},
                       {"temperature", 0},
                       {"max_tokens", most},
                       {"logprobs", 1},
                       {"echo", true}};
    const Json logprobs = Post(server, kCompletions, body.dump()).body["choices"][0]["logprobs"];
    ASSERT_EQ(logprobs["token_logprobs"].size(), static_cast<size_t>(10 + most)) << logprobs;
    EXPECT_TRUE(logprobs["token_logprobs"][0].is_null());
    for (size_t i = 0; i < 9; ++i) {
      EXPECT_EQ(logprobs["token_logprobs"][i + 1].get<float>(),
                expected.prompt_info().prompt_logprobs(static_cast<int>(i)).logprob());
    }
  }
}

TEST(OpenAiServer, TokensOfATextAndBack) {
  TestServer server;
  const Answer ids = Post(server, "/tokenize", R"({"model": "prefix", "prompt": "abz"})");
  EXPECT_EQ(ids.body, Json({{"count", 3}, {"max_model_len", 1024}, {"tokens", {0, 1, 25}}}));
  EXPECT_EQ(Post(server, "/detokenize", R"({"tokens": [0, 1, 25]})").body["prompt"], "abz");
  EXPECT_EQ(Post(server, "/tokenize", R"({"messages": []})").body["error"]["message"],
            "messages: this model has no usable chat template, expected text or token_ids");
  EXPECT_EQ(Post(server, "/detokenize", R"({"tokens": [50]})").body["error"]["message"],
            "tokens[0] is 50, expected 0 to 49");
  EXPECT_EQ(Post(server, "/detokenize", "{}").code, 400);
}

// By the names that lm-eval's client reads (RemoteTokenizer in lm_eval/utils.py).
TEST(OpenAiServer, TellsWhatATokenizerNeedsBesideItsTokens) {
  const TestServer server({.chat_template = kTemplate});
  EXPECT_EQ(Get(server, "/tokenizer_info").body, Json({{"chat_template", kTemplate},
                                                       {"bos_token", nullptr},
                                                       {"eos_token", "xx"},
                                                       {"pad_token", nullptr},
                                                       {"unk_token", nullptr}}));
}

}  // namespace
}  // namespace treadle
