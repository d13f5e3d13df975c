// Anthropic's Messages API: what bodies mean, and answers in its words. Shapes and names are those
// of Anthropic's Python package 2.14 (types/message_create_params.py, types/raw_message_*.py) and
// of its page on streaming.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/status.h"
#include "server/anthropic/messages_answer.h"
#include "server/anthropic/messages_request.h"
#include "tests/server/anthropic/documented_fields.h"
#include "tests/server/openai/chat_model.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

const char kHello[] = R"("messages": [{"role": "user", "content": "Hi"}])";
const char kTools[] =
    R"("tools": [{"name": "weather", "description": "now", "cache_control": {"type": "ephemeral"},)"
    R"( "input_schema": {"type": "object", "properties": {"city": {}, "at": {}}}},)"
    R"( {"type": "custom", "name": "time"}])";

std::string Body(const std::string& more, const std::string& messages = kHello) {
  return Str("{\"max_tokens\": 9, ", messages, more.empty() ? "" : ", ", more, "}");
}
std::string PromptOf(const std::string& body) {
  const ServedModel model = ChatModel();
  return RenderedPrompt(model, ReadMessagesRequest(body, model));
}
// A request of one user message, and what is around it.
std::string Messages(const std::string& messages) { return R"("messages": [)" + messages + "]"; }

TEST(MessagesRequest, BecomesAChat) {
  EXPECT_EQ(PromptOf(Body("")), "[user]Hi");
  EXPECT_EQ(PromptOf(Body(R"("system": "Be kind.")")), "[system]Be kind.[user]Hi");
  EXPECT_EQ(
      PromptOf(
          Body(R"("system": [{"type": "text", "text": "a", "cache_control": {}},)"
               R"( {"type": "text", "text": "b"}], "metadata": {"user_id": "u"}, "stream": true)")),
      "[system]a\nb[user]Hi");
  EXPECT_EQ(PromptOf(Body(R"("system": [])")), "[user]Hi");
  EXPECT_EQ(PromptOf(Body(kTools)), Str(kToolsOfChat, "[user]Hi"));
  EXPECT_EQ(PromptOf(Body(Str(kTools, R"(, "tool_choice": {"type": "none"})"))), "[user]Hi");
}

// A conversation with thinking and calls, as clients send it back: arguments keep their order,
// results come before what the user says, and turns of one role are one.
TEST(MessagesRequest, CallsAndResultsBecomeTheChats) {
  const std::string messages = Messages(
      R"({"role": "user", "content": "Hi"}, {"role": "user", "content": "you"},)"
      R"( {"role": "assistant", "content": [)"
      R"({"type": "thinking", "thinking": "hm", "signature": "s"},)"
      R"( {"type": "redacted_thinking", "data": "d"}, {"type": "text", "text": "I look."},)"
      R"( {"type": "tool_use", "id": "t1", "name": "weather", "caller": {"type": "direct"},)"
      R"( "input": {"city": "B", "at": [1, 2.5, null]}},)"
      R"( {"type": "tool_use", "id": "t2", "name": "time", "input": {}}]},)"
      R"( {"role": "user", "content": [)"
      R"({"type": "tool_result", "tool_use_id": "t1", "content": "sun", "is_error": false},)"
      R"( {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "1"},)"
      R"( {"type": "text", "text": "2"}]}, {"type": "text", "text": "Well?"}]})");
  EXPECT_EQ(PromptOf(Body("", messages)),
            "[user]Hi\nyou[assistant]I look."
            R"(<tool_call>{"name": "weather", "arguments": {"city": "B", "at": [1, 2.5, null]}})"
            R"(</tool_call><tool_call>{"name": "time", "arguments": {}}</tool_call>)"
            "[tool]sun(weather, t1)[tool]1\n2(time, t2)[user]Well?");
  EXPECT_EQ(
      PromptOf(Body(
          "",
          Messages(
              R"({"role": "user", "content": "a"}, {"role": "assistant", "content": [)"
              R"({"type": "tool_use", "id": "t", "name": "f", "input": {}}]},)"
              R"( {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]})"))),
      "[user]a[assistant]<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>[tool](f, t)");
}

TEST(MessagesRequest, FieldsReachTheirPlaces) {
  const ServedModel model = ChatModel();
  const auto read = ReadMessagesRequest(
      Body(Str(kTools, R"(, "stop_sequences": ["a", "b"], "temperature": 0.5, "top_k": 3,)",
               R"( "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},)",
               R"( "thinking": {"type": "adaptive"}, "stream": true, "model": "m",)",
               R"( "output_config": {"effort": "low", "format": {"type": "json_schema",)",
               R"( "schema": {"z": 1, "a": 2}}})")),
      model);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->stream);
  EXPECT_FALSE(read->reading.parallel);
  EXPECT_EQ(read->common.sampling.parameters.top_k, 3);
  EXPECT_EQ(read->common.stopping.stop_strings, (std::vector<std::string>{"a", "b"}));
  ASSERT_TRUE(read->common.constraint);
  EXPECT_EQ(read->common.constraint->text, R"({"z": 1, "a": 2})");
  EXPECT_EQ(read->common.constraint->field, "output_config.format");
  ASSERT_EQ(read->common.constraint->tags.size(), 2u);
  EXPECT_EQ(read->common.constraint->tags[0].field, "");  // it need not be enforced

  for (const auto& [choice, tags] :
       {std::pair(R"({"type": "any"})", 2u), {R"({"type": "tool", "name": "time"})", 1u}}) {
    const auto held = ReadMessagesRequest(Body(Str(kTools, R"(, "tool_choice": )", choice)), model);
    ASSERT_TRUE(held.ok() && held->common.constraint) << held.status();
    EXPECT_EQ(held->common.constraint->tags.size(), tags);
    EXPECT_THAT(held->common.constraint->tags[0].field, testing::EndsWith("].input_schema"));
  }
}

// Clients ask for as much as Anthropic's models could answer.
TEST(MessagesRequest, MoreTokensThanFitAreThoseThatFit) {
  ServedModel model = ChatModel("{{ messages[0].content }}");
  model.max_context = 64;
  const auto most = [&](const std::string& body) {
    const auto read = ReadMessagesRequest(body, model);
    EXPECT_TRUE(read.ok()) << read.status();
    const auto valid = ValidateRequest(read->For(0), model, {}, 1);
    EXPECT_TRUE(valid.ok()) << valid.status();
    return valid.ok() ? valid->spec.max_new_tokens : 0;
  };
  EXPECT_EQ(most(Str(R"({"max_tokens": 32000, )", kHello, "}")), 62);
  EXPECT_EQ(most(Body("")), 9);
}

TEST(MessagesRequest, WhatIsWrongIsNamed) {
  const auto block = [](const std::string& text, const char* role = "user") {
    return Messages(Str(R"({"role": ")", role, R"(", "content": [)", text, "]}"));
  };
  const std::pair<std::string, std::string> bodies[] = {
      {R"({"max_tokens": 1})", "messages is missing"},
      {Str("{", kHello, "}"), "max_tokens is missing"},
      {Str(R"({"max_tokens": 0, )", kHello, "}"), "max_tokens is 0, expected at least 1"},
      {Str(R"({"max_tokens": "a", )", kHello, "}"), "max_tokens is \"a\", expected a whole number"},
      {Body("", Messages("")), "messages has no content, expected some"},
      {Body("", Messages("1")), "messages[0] is 1, expected an object"},
      {Body("", Messages(R"({"role": "tool"})")), R"(messages[0].role is "tool", expected "user")"},
      {Body("", Messages(R"({"role": "user"})")), "messages[0].content is missing"},
      {Body("", Messages(R"({"role": "user", "content": 1})")),
       "messages[0].content is 1, expected a string or an array of blocks"},
      {Body("", Messages(R"({"role": "user", "content": "a", "name": "b"})")),
       "messages[0].name is not supported"},
      {Body("", Messages(R"({"role": "assistant", "content": "a"})")),
       "messages[0].role is \"assistant\", expected the last message to be the user's"},
      {Body("", block(R"({"type": "image", "source": {}})")),
       R"(messages[0].content[0].type is "image", expected "text" or "tool_result")"},
      {Body("", block(R"({"type": "text"}, {"type": "text", "text": 1})")),
       "messages[0].content[1].text is 1, expected a string"},
      {Body("", block(R"({"type": "tool_use"})")), R"(type is "tool_use", expected "text" or)"},
      {Body("", block(R"({"type": "tool_result", "tool_use_id": "t", "content": "a"})")),
       R"(messages[0].content[0].tool_use_id is "t", expected the id of a tool_use block)"},
      {Body("", block(R"({"type": "tool_use", "id": "t", "name": "f"})", "assistant")),
       "messages[0].content[0].input is missing"},
      {Body("", block(R"({"type": "tool_use", "id": "t", "name": "f", "input": []})", "assistant")),
       "messages[0].content[0].input is [], expected an object"},
      {Body(R"("system": [{"type": "image"}])"), R"(system[0].type is "image", expected "text")"},
      {Body(R"("tools": [{"type": "web_search_20260318", "name": "web_search"}])"),
       R"(tools[0].type is "web_search_20260318", expected "custom")"},
      {Body(R"("tools": [{"name": "f", "input_schema": 1}])"),
       "tools[0].input_schema is 1, expected an object"},
      {Body(R"("tools": [{"name": "f", "parameters": {}}])"),
       "tools[0].parameters is not supported"},
      {Body(R"("tool_choice": {"type": "required"})"),
       R"(tool_choice.type is "required", expected "auto", "any", "tool" or "none")"},
      {Body(R"("tool_choice": {"type": "tool"})"), "tool_choice.name is missing"},
      {Body(R"("tool_choice": {"type": "any"})"), "tool_choice is a demand for a call"},
      {Body(Str(kTools, R"(, "tool_choice": {"type": "tool", "name": "f"})")),
       R"(tool_choice.name is "f", expected one of tools)"},
      {Body(R"("output_config": {"format": {"type": "regex"}})"),
       R"(output_config.format.type is "regex", expected "json_schema")"},
      {Body(R"("output_format": {"type": "json_schema"})"), "output_format.schema is missing"},
      {Body(R"("stop_sequences": "a")"), "stop_sequences is \"a\", expected an array of strings"},
      {Body(R"("stop_sequences": ["a", 1])"), "stop_sequences[1] is 1, expected a string"},
      {Body(R"("container": "c")"), "container is not supported"},
      {Body(R"("mcp_servers": [1])"), "mcp_servers is [1], expected []"},
      {Body(R"("max_token": 1)"), "max_token is not supported"}};
  for (const auto& [body, message] : bodies)
    EXPECT_THAT(PromptOf(body), HasSubstr(message)) << body;
}

TEST(MessagesRequest, ErrorsSpeakOfAnthropicsFields) {
  const ServedModel model = ChatModel();
  const auto told = [&](const std::string& body) {
    const auto read = ReadMessagesRequest(body, model);
    EXPECT_TRUE(read.ok()) << read.status();
    const auto valid = ValidateRequest(read->For(0), model, {}, 1);
    return Json::parse(MessagesError(valid.status()).body)["error"]["message"].get<std::string>();
  };
  EXPECT_THAT(told(Body(Str(R"("stop_sequences": [")", std::string(600, 'a'), "\"]"))),
              HasSubstr("stop_sequences[0] has 600 bytes"));
  EXPECT_THAT(told(Body(R"("top_p": 2)")), HasSubstr("top_p is 2, expected (0, 1]"));
  const std::string raising =
      Messages(R"({"role": "user", "content": ")" + std::string(4096, 'a') + "\"}");
  EXPECT_THAT(told(Body("", raising)), testing::StartsWith("messages has 4102 tokens, expected"));
}

// Status and type by Anthropic's page on errors; its 529, which stands for overload, is HTTP's 503.
TEST(MessagesAnswer, ErrorsAreOfAnthropicsTypes) {
  const std::tuple<absl::Status, int, const char*> rows[] = {
      {absl::InvalidArgumentError("a"), 400, "invalid_request_error"},
      {absl::UnauthenticatedError("a"), 401, "authentication_error"},
      {absl::PermissionDeniedError("a"), 403, "permission_error"},
      {absl::NotFoundError("a"), 404, "not_found_error"},
      {absl::ResourceExhaustedError("a"), 429, "rate_limit_error"},
      {absl::InternalError("a"), 500, "api_error"},
      {absl::UnavailableError("a"), 503, "overloaded_error"},
      {absl::DeadlineExceededError("a"), 504, "timeout_error"}};
  for (const auto& [status, code, type] : rows) {
    const HttpResponse error = MessagesError(status);
    EXPECT_EQ(error.code, code);
    EXPECT_EQ(Json::parse(error.body),
              Json({{"type", "error"}, {"error", {{"type", type}, {"message", "a"}}}}));
  }
}

class Told {
 public:
  explicit Told(const std::string& more)
      : request_(*ReadMessagesRequest(Body(Str(kTools, more)), model_)),
        answer_(model_, request_, "msg_1") {
    AddPrompt(answer_);
  }
  MessagesAnswer& answer() { return answer_; }
  Told& Output(const OutputPart& part) {
    AddOutput(answer_, part);
    return *this;
  }

 private:
  const ServedModel model_ = ChatModel();
  const OpenAiRequest request_;
  MessagesAnswer answer_;
};

TEST(MessagesAnswer, AWholeOneHasItsBlocks) {
  Told told("");
  told.Output({.text = "I look.\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": ",
               .token_ids = {1, 2}});
  told.Output({.text = "\"B\"}}</tool_call>", .token_ids = {3}, .finish = FinishReason::kEndToken});
  Json answer = Json::parse(told.answer().Whole());
  const std::string id = answer["content"][1]["id"];
  EXPECT_THAT(id, testing::StartsWith("call_"));
  EXPECT_EQ(answer, Json::parse(Str(R"({
      "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
      "content": [{"type": "text", "text": "I look.", "citations": null},
                  {"type": "tool_use", "id": ")",
                                    id, R"(", "name": "weather",
                   "input": {"city": "B"}}],
      "stop_reason": "tool_use", "stop_sequence": null,
      "usage": {"input_tokens": 3, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 2, "output_tokens": 3,
                "output_tokens_details": {"thinking_tokens": 0}}})")));
}

TEST(MessagesAnswer, SaysWhyItEnded) {
  const auto stop = [](const OutputPart& part) {
    const Json answer = Json::parse(Told("").Output(part).answer().Whole());
    return Str(answer["stop_reason"].get<std::string>(), " ", answer["stop_sequence"].dump());
  };
  const std::vector<int32_t> nine(9, 1);
  EXPECT_EQ(stop({.text = "a", .finish = FinishReason::kEndToken}), "end_turn null");
  EXPECT_EQ(stop({.text = "a", .finish = FinishReason::kStopString, .stop_string = "b"}),
            "stop_sequence \"b\"");
  EXPECT_EQ(stop({.text = "a", .token_ids = nine, .finish = FinishReason::kLength}),
            "max_tokens null");
  EXPECT_EQ(stop({.text = "a", .finish = FinishReason::kLength}),
            "model_context_window_exceeded null");
  // A call that is cut off is text.
  EXPECT_EQ(
      stop({.text = "<tool_call>{\"name\"", .token_ids = nine, .finish = FinishReason::kLength}),
      "max_tokens null");
}

TEST(MessagesAnswer, AStreamTellsBlocksOneAfterAnother) {
  Told told(R"(, "stream": true)");
  const auto event = [](const std::string& type, const std::string& members) {
    return Str("event: ", type, "\ndata: {\"type\":\"", type, "\"", members, "}\n\n");
  };
  EXPECT_EQ(
      told.answer().TakeEvents(),
      event("message_start",
            R"(,"message":{"id":"msg_1","type":"message","role":"assistant","model":"m",)"
            R"("content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":3,)"
            R"("cache_creation_input_tokens":0,"cache_read_input_tokens":2,"output_tokens":0,)"
            R"("output_tokens_details":{"thinking_tokens":0}}})") +
          event("ping", ""));
  EXPECT_EQ(
      told.Output({.text = "Ah \n", .token_ids = {1}}).answer().TakeEvents(),
      event("content_block_start",
            R"(,"index":0,"content_block":{"type":"text","text":"","citations":null})") +
          event("content_block_delta", R"(,"index":0,"delta":{"type":"text_delta","text":"Ah"})"));
  const std::string call =
      told.Output({.text = "<tool_call>{\"name\": \"time\", \"arguments\": {\"a\": 1}}"})
          .answer()
          .TakeEvents();
  EXPECT_THAT(
      call,
      testing::MatchesRegex(
          "event: content_block_stop\ndata: .\"type\":\"content_block_stop\",\"index\":0.\n\n"
          "event: content_block_start\ndata: [^\n]*\"index\":1,\"content_block\":."
          "\"type\":\"tool_use\",\"id\":\"call_[0-9a-f_]*\",\"name\":\"time\",\"input\":....\n\n"
          "event: content_block_delta\ndata: [^\n]*\"partial_json\":\".{8,}\n\n"
          "event: content_block_stop\ndata: [^\n]*\"index\":1.\n\n"));
  EXPECT_EQ(
      told.Output({.token_ids = {4}, .finish = FinishReason::kEndToken}).answer().TakeEvents(),
      event("message_delta", R"(,"delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{)"
                             R"("input_tokens":3,"cache_creation_input_tokens":0,)"
                             R"("cache_read_input_tokens":2,"output_tokens":2,)"
                             R"("output_tokens_details":{"thinking_tokens":0}})") +
          event("message_stop", ""));
  EXPECT_EQ(told.answer().LastEvents(), "");
}

// A block of its own, with the signature that clients expect; and counted.
TEST(MessagesAnswer, ThinkingIsABlock) {
  const ServedModel model = ChatModel(R"({{ messages[0].content }}{# <think> </think> #})");
  ASSERT_OK_AND_ASSIGN(const auto request, ReadMessagesRequest(Body(R"("stream": true)"), model));
  MessagesAnswer answer(model, request, "msg_1");
  const OutputPart part{.text = "<think>hm</think>Hi",
                        .token_ids = {1, 2, 3, 4},
                        .ends = {7, 9, 17, 19},
                        .finish = FinishReason::kEndToken};
  AddOutput(answer, part);
  const Json whole = Json::parse(answer.Whole());
  EXPECT_EQ(whole["content"], Json::parse(R"([
      {"type": "thinking", "thinking": "hm", "signature": ""},
      {"type": "text", "text": "Hi", "citations": null}])"));
  EXPECT_EQ(whole["usage"]["output_tokens_details"]["thinking_tokens"], 1);
  EXPECT_THAT(answer.TakeEvents(),
              HasSubstr(R"("index":0,"delta":{"type":"thinking_delta","thinking":"hm"}})"));
}

TEST(MessagesRequest, ThinkingMayBeSwitchedOff) {
  const ServedModel model = ChatModel(R"({{ enable_thinking }}{{ messages[0].content }})");
  const auto prompt = [&](const std::string& more) {
    return RenderedPrompt(model, ReadMessagesRequest(Body(more), model));
  };
  EXPECT_EQ(prompt(R"("thinking": {"type": "disabled"})"), "FalseHi");
  EXPECT_EQ(prompt(R"("thinking": {"type": "enabled", "budget_tokens": 1024})"), "TrueHi");
  EXPECT_THAT(prompt(R"("thinking": {"type": "off"})"),
              HasSubstr(R"(thinking.type is "off", exp)"));
}

// docs/api.md says of every field what becomes of it: those of Anthropic's Python package 2.14
// (types/message_create_params.py and the one of types/beta/), `stream`, of its older ones
// temperature, top_p, top_k and output_format, and the sampling parameters that we add.
TEST(MessagesRequest, TheDocumentHasEveryField) {
  constexpr const char* kNames =
      "max_tokens messages model cache_control container diagnostics inference_geo metadata "
      "output_config service_tier speed stop_sequences system thinking tool_choice tools "
      "user_profile_id workspace_id billing_policy compaction context_management "
      "fallback_credit_token fallbacks mcp_servers thread stream temperature top_p top_k "
      "output_format min_p repetition_penalty presence_penalty frequency_penalty";
  ExpectDocumented("## Anthropic's Messages API", MessagesFields(), kNames);
}

}  // namespace
}  // namespace treadle
