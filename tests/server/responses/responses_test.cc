// OpenAI's Responses API: what bodies mean, answers in its words, and which of them are kept.
// Shapes and names are those of OpenAI's Python package 3.57 (types/responses/).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_split.h"
#include "base/status.h"
#include "server/openai/openai_errors.h"
#include "server/responses/responses_answer.h"
#include "server/responses/responses_request.h"
#include "tests/server/anthropic/documented_fields.h"
#include "tests/server/openai/chat_model.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using std::chrono::hours;
using testing::HasSubstr;

const char kTools[] =
    R"("tools": [{"type": "function", "name": "weather", "description": "now", "strict": true,)"
    R"( "parameters": {"type": "object", "properties": {"city": {}, "at": {}}}},)"
    R"( {"type": "function", "name": "time", "parameters": null}])";

std::shared_ptr<const KeptResponse> FindEarlier(const std::string& id) {
  if (id != "resp_1") return nullptr;
  return std::make_shared<KeptResponse>(KeptResponse{
      .id = id,
      .messages = {{.role = "user", .content = "Hi"},
                   {.role = "assistant", .tool_calls = {{"c1", "weather", R"({"city": "B"})"}}}}});
}

absl::StatusOr<ResponsesRequest> Read(const std::string& body, const ServedModel& model) {
  return ReadResponsesRequest(body, model, FindEarlier);
}
std::string Body(const std::string& more, const std::string& input = R"("Hi")") {
  return Str(R"({"input": )", input, more.empty() ? "" : ", ", more, "}");
}
std::string PromptOf(const std::string& body) {
  const ServedModel model = ChatModel();
  return RenderedPrompt(model, Read(body, model));
}

TEST(ResponsesRequest, BecomesAChat) {
  EXPECT_EQ(PromptOf(Body("")), "[user]Hi");
  EXPECT_EQ(PromptOf(Body(R"("instructions": "Be kind.", "stream": true)")),
            "[system]Be kind.[user]Hi");
  EXPECT_EQ(PromptOf(Body("", R"([{"role": "developer", "content": "a"},)"
                              R"( {"type": "message", "role": "user", "content": [)"
                              R"({"type": "input_text", "text": "b"},)"
                              R"( {"type": "input_text", "text": "c"}]}])")),
            "[system]a[user]b\nc");
  EXPECT_EQ(PromptOf(Body(kTools)), Str(kToolsOfChat, "[user]Hi"));
  EXPECT_EQ(PromptOf(Body(Str(kTools, R"(, "tool_choice": "none")"))), "[user]Hi");
}

// Items as an answer had them, sent back with the output of a call.
TEST(ResponsesRequest, ItemsBecomeAConversation) {
  EXPECT_EQ(PromptOf(Body("", R"([{"role": "user", "content": "Hi"},)"
                              R"( {"id": "rs_1", "type": "reasoning", "summary": []},)"
                              R"( {"id": "msg_1", "type": "message", "status": "completed",)"
                              R"( "role": "assistant", "content": [{"type": "output_text",)"
                              R"( "text": "I look.", "annotations": [], "logprobs": []}]},)"
                              R"( {"id": "fc_1", "type": "function_call", "call_id": "c1",)"
                              R"( "status": "completed", "name": "weather",)"
                              R"( "arguments": "{\"city\": \"B\", \"at\": 1}"},)"
                              R"( {"type": "function_call_output", "call_id": "c1",)"
                              R"( "output": [{"type": "input_text", "text": "sun"}]},)"
                              R"( {"role": "user", "content": "And?"}])")),
            R"([user]Hi[assistant]I look.<tool_call>{"name": "weather", "arguments": )"
            R"({"city": "B", "at": 1}}</tool_call>[tool]sun(weather, c1)[user]And?)");
}

// Its conversation comes before the input; its instructions are not carried over.
TEST(ResponsesRequest, GoesOnFromAnEarlierOne) {
  EXPECT_EQ(
      PromptOf(Body(R"("previous_response_id": "resp_1", "instructions": "New.")",
                    R"([{"type": "function_call_output", "call_id": "c1", "output": "sun"}])")),
      R"([system]New.[user]Hi[assistant]<tool_call>{"name": "weather", "arguments": )"
      R"({"city": "B"}}</tool_call>[tool]sun(weather, c1))");
}

TEST(ResponsesRequest, FieldsReachTheirPlaces) {
  const ServedModel model = ChatModel();
  const auto read =
      Read(Body(Str(kTools, R"(, "max_output_tokens": 9, "temperature": 0.5, "store": false,)",
                    R"( "parallel_tool_calls": false, "metadata": {"a": "b"}, "stream": true,)",
                    R"( "text": {"format": {"type": "json_schema", "name": "n", "strict": true,)",
                    R"( "schema": {"z": 1, "a": 2}}})")),
           model);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->stream);
  EXPECT_FALSE(read->store);
  EXPECT_FALSE(read->reading.parallel);
  EXPECT_EQ(read->common.stopping.max_new_tokens, 9);
  ASSERT_TRUE(read->common.constraint);
  EXPECT_EQ(read->common.constraint->text, R"({"z": 1, "a": 2})");
  EXPECT_EQ(read->common.constraint->field, "text.format");
  ASSERT_EQ(read->common.constraint->tags.size(), 2u);
  EXPECT_EQ(read->common.constraint->tags[0].field, "tools[0].parameters");
  const Json echo = Json::parse("{" + read->echo + "}");
  EXPECT_EQ(echo["metadata"], Json({{"a", "b"}}));
  EXPECT_EQ(echo["max_output_tokens"], 9);
  EXPECT_EQ(echo["tools"].size(), 2u);
  EXPECT_EQ(echo["tool_choice"], "auto");
  EXPECT_EQ(echo["store"], false);

  const auto object = Read(Body(R"("text": {"format": {"type": "json_object"}})"), model);
  ASSERT_TRUE(object.ok() && object->common.constraint) << object.status();
  EXPECT_EQ(object->common.constraint->kind, Constraint::Kind::kJsonObject);
  EXPECT_FALSE(Read(Body(R"("text": {"format": {"type": "text"}})"), model)->common.constraint);
  const auto held =
      Read(Body(Str(kTools, R"(, "tool_choice": {"type": "function", "name": "time"})")), model);
  ASSERT_TRUE(held.ok() && held->common.constraint) << held.status();
  EXPECT_EQ(held->common.constraint->tags.size(), 1u);
}

TEST(ResponsesRequest, WhatIsWrongIsNamed) {
  const auto items = [](const std::string& text) { return Body("", "[" + text + "]"); };
  const auto content = [&](const std::string& text) {
    return items(Str(R"({"role": "user", "content": )", text, "}"));
  };
  const std::pair<std::string, std::string> bodies[] = {
      {"{}", "input is missing"},
      {Body("", "[]"), "input is missing"},
      {Body("", "1"), "input is 1, expected a string or an array of items"},
      {items("1"), "input[0] is 1, expected an object"},
      {items(R"({"type": "item_reference", "id": "msg_1"})"),
       R"(input[0].type is "item_reference", expected "message", "function_call")"},
      {items(R"({"content": "a"})"), "input[0].role is missing"},
      {items(R"({"role": "tool", "content": "a"})"), R"(input[0].role is "tool", expected "user")"},
      {items(R"({"role": "user"})"), "input[0].content is missing"},
      {items(R"({"role": "user", "content": "a", "audio": 1})"), "input[0].audio is not supported"},
      {content("1"), "input[0].content is 1, expected a string or an array of parts"},
      {content(R"([{"type": "input_image", "image_url": "u"}])"),
       R"(input[0].content[0].type is "input_image", expected "input_text")"},
      {content(R"([{"type": "input_text", "text": 1}])"),
       "input[0].content[0].text is 1, expected a string"},
      {items(R"({"type": "function_call", "name": "f", "arguments": "{}"})"),
       "input[0].call_id is missing"},
      {items(R"({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{1}"})"),
       "input[0].arguments: is not valid JSON at byte 2"},
      {items(R"({"type": "function_call_output", "call_id": "c"})"), "input[0].output is missing"},
      {items(R"({"type": "function_call_output", "call_id": "c", "output": "a"})"),
       R"(input has an output for call_id "c", expected one of a function_call before it)"},
      {Body(R"("previous_response_id": "resp_2")"),
       R"(previous_response_id is "resp_2", expected the id of a response that is kept)"},
      {Body(R"("tools": [{"type": "web_search"}])"),
       R"(tools[0].type is "web_search", expected "function")"},
      {Body(R"("tools": [{"type": "function", "function": {"name": "f"}}])"),
       "tools[0].function is not supported"},
      {Body(R"("tool_choice": "any")"), R"(tool_choice is "any", expected "auto")"},
      {Body(R"("tool_choice": {"type": "mcp"})"),
       R"(tool_choice.type is "mcp", expected "function")"},
      {Body(R"("tool_choice": {"type": "function"})"), "tool_choice.name is missing"},
      {Body(Str(kTools, R"(, "tool_choice": {"type": "function", "name": "f"})")),
       R"(tool_choice.name is "f", expected one of tools)"},
      {Body(R"("text": 3)"), "text is 3, expected an object"},
      {Body(R"("text": {"format": {"type": "grammar"}})"),
       R"(text.format.type is "grammar", expected "text", "json_object" or "json_schema")"},
      {Body(R"("text": {"format": {"type": "json_schema", "name": "n"}})"),
       "text.format.schema is missing"},
      {Body(R"("text": {"verbosity": "low"})"), R"(text.verbosity is "low", expected "medium")"},
      {Body(R"("include": ["message.output_text.logprobs"])"),
       R"(include is ["message.output_text.logprobs"], expected [] or)"},
      {Body(R"("background": true)"), "background is true, expected false"},
      {Body(R"("truncation": "auto")"), R"(truncation is "auto", expected "disabled")"},
      {Body(R"("conversation": "c")"), "conversation is not supported"},
      {Body(R"("max_tokens": 1)"), "max_tokens is not supported"}};
  for (const auto& [body, message] : bodies)
    EXPECT_THAT(PromptOf(body), HasSubstr(message)) << body;
}

TEST(ResponsesRequest, ErrorsSpeakOfItsFields) {
  const ServedModel model = ChatModel();
  const auto told = [&](const std::string& body) {
    const auto read = Read(body, model);
    const absl::Status status =
        read.ok() ? ValidateRequest(read->For(0), model, {}, 1).status() : read.status();
    return Json::parse(
        OpenAiError(status, OpenAiKind::kResponse, "max_output_tokens").body)["error"];
  };
  EXPECT_EQ(told(Body(R"("max_output_tokens": 0)"))["message"],
            "max_output_tokens is 0, expected at least 1");
  EXPECT_EQ(told(Body(R"("max_output_tokens": 0)"))["param"], "max_output_tokens");
  EXPECT_EQ(told(Body(R"("text": 3)"))["message"], "text is 3, expected an object");
  EXPECT_THAT(told(Body("", Str("\"", std::string(4096, 'a'), "\"")))["message"].get<std::string>(),
              testing::StartsWith("input has 4102 tokens, expected"));
}

// Response that is sent back to a client, and kept.
class Told {
 public:
  explicit Told(const std::string& more)
      : request_(*Read(Body(Str(kTools, more)), model_)),
        answer_(model_, request_, "resp_1", 5, "ann", store_) {
    AddPrompt(answer_);
  }
  ResponsesAnswer& answer() { return answer_; }
  std::shared_ptr<const KeptResponse> kept(const std::string& owner) const {
    return store_->Find("resp_1", owner, Clock::now());
  }
  std::string Output(const OutputPart& part) {
    AddOutput(answer_, part);
    return answer_.TakeEvents();
  }

 private:
  const ServedModel model_ = ChatModel();
  const std::shared_ptr<ResponseStore> store_ =
      std::make_shared<ResponseStore>(ResponseStore::Limits());
  const ResponsesRequest request_;
  ResponsesAnswer answer_;
};

std::vector<Json> EventsIn(const std::string& stream) {
  std::vector<Json> events;
  for (size_t at = 0; (at = stream.find("\ndata: ", at)) != std::string::npos; ++at) {
    const size_t begin = at + 7;
    events.push_back(Json::parse(stream.substr(begin, stream.find('\n', begin) - begin)));
    EXPECT_THAT(stream.substr(0, at),
                testing::EndsWith("event: " + events.back()["type"].get<std::string>()));
  }
  return events;
}

TEST(ResponsesAnswer, AWholeOneHasItsItemsAndIsKept) {
  Told told("");
  told.Output({.text = "I look.\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": ",
               .token_ids = {1, 2}});
  EXPECT_EQ(told.kept("ann"), nullptr) << "not before its end";
  told.Output({.text = "\"B\"}}</tool_call>", .token_ids = {3}, .finish = FinishReason::kEndToken});
  const Json answer = Json::parse(told.answer().Whole());
  const std::string text = answer["output"][0]["id"], call = answer["output"][1]["call_id"];
  EXPECT_EQ(answer["output"],
            Json::parse(Str(R"([{"id": ")", text,
                            R"(", "type": "message", "status": "completed", "role": "assistant",
           "content": [{"type": "output_text", "text": "I look.", "annotations": [],
                        "logprobs": []}]},
          {"id": "fc_)",
                            call, R"(", "type": "function_call", "status": "completed",
           "call_id": ")",
                            call, R"(", "name": "weather", "arguments": "{\"city\": \"B\"}"}])")));
  EXPECT_THAT(text, testing::StartsWith("msg_"));
  EXPECT_EQ(answer["status"], "completed");
  EXPECT_EQ(answer["object"], "response");
  EXPECT_EQ(answer["incomplete_details"], nullptr);
  EXPECT_EQ(answer["usage"],
            Json::parse(R"({"input_tokens": 5, "input_tokens_details": {"cached_tokens": 2,
                            "cache_write_tokens": 0}, "output_tokens": 3,
                            "output_tokens_details": {"reasoning_tokens": 0},
                            "total_tokens": 8})"));
  ASSERT_NE(told.kept("ann"), nullptr);
  EXPECT_EQ(told.kept("bob"), nullptr);
  EXPECT_EQ(told.kept("ann")->body, told.answer().Whole());
  const std::vector<ChatMessage>& messages = told.kept("ann")->messages;
  ASSERT_EQ(messages.size(), 2u);
  EXPECT_EQ(messages[1].content, "I look.");
  ASSERT_EQ(messages[1].tool_calls.size(), 1u);
  EXPECT_EQ(messages[1].tool_calls[0].id, call);

  Told not_kept(R"(, "store": false)");
  not_kept.Output({.text = "a", .finish = FinishReason::kEndToken});
  EXPECT_EQ(not_kept.kept("ann"), nullptr);
}

TEST(ResponsesAnswer, OneThatIsCutOffIsIncomplete) {
  Told told(R"(, "stream": true)");
  const std::vector<Json> events =
      EventsIn(told.Output({.text = "a", .token_ids = {1}, .finish = FinishReason::kLength}));
  EXPECT_EQ(events.back()["type"], "response.incomplete");
  const Json response = events.back()["response"];
  EXPECT_EQ(response["status"], "incomplete");
  EXPECT_EQ(response["incomplete_details"], Json({{"reason", "max_output_tokens"}}));
  EXPECT_EQ(response["output"][0]["status"], "incomplete");
}

TEST(ResponsesAnswer, AStreamNumbersItsEvents) {
  Told told(R"(, "stream": true)");
  std::string stream = told.answer().TakeEvents();
  stream += told.Output({.text = "Ah \n", .token_ids = {1}});
  stream += told.Output({.text = "<tool_call>{\"name\": \"time\", \"arguments\": {\"a\": 1}}"});
  stream += told.Output({.token_ids = {4}, .finish = FinishReason::kEndToken});
  stream += told.answer().LastEvents();
  const std::vector<Json> events = EventsIn(stream);
  constexpr const char* kTypes =
      "created in_progress output_item.added content_part.added output_text.delta "
      "output_text.done content_part.done output_item.done output_item.added "
      "function_call_arguments.delta function_call_arguments.done output_item.done completed";
  const std::vector<std::string> types = absl::StrSplit(kTypes, ' ');
  ASSERT_EQ(events.size(), types.size());
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i]["type"], "response." + types[i]);
    EXPECT_EQ(events[i]["sequence_number"], i);
  }
  EXPECT_EQ(events[0]["response"]["status"], "in_progress");
  EXPECT_EQ(events[0]["response"]["output"], Json::array());
  EXPECT_EQ(events[2]["item"]["content"], Json::array());
  EXPECT_EQ(events[4]["delta"], "Ah");
  EXPECT_EQ(events[5]["text"], "Ah");
  for (const size_t i : {3, 4, 5, 6}) {
    EXPECT_EQ(events[i]["item_id"], events[2]["item"]["id"]);
    EXPECT_EQ(events[i]["output_index"], 0);
    EXPECT_EQ(events[i]["content_index"], 0);
  }
  EXPECT_EQ(events[8]["item"]["arguments"], "");
  EXPECT_EQ(events[9]["delta"], R"({"a": 1})");
  EXPECT_EQ(events[10]["arguments"], R"({"a": 1})");
  EXPECT_EQ(events[10]["item_id"], events[8]["item"]["id"]);
  EXPECT_EQ(events[11]["output_index"], 1);
  EXPECT_EQ(events[12]["response"]["output"], Json::array({events[7]["item"], events[11]["item"]}));
}

TEST(ResponsesAnswer, ThinkingIsAnItem) {
  const ServedModel model = ChatModel(R"({{ messages[0].content }}{# <think> </think> #})");
  ASSERT_OK_AND_ASSIGN(const auto request, Read(Body(R"("stream": true)"), model));
  ResponsesAnswer answer(model, request, "resp_1", 5, "", nullptr);
  const OutputPart part{.text = "<think>hm</think>Hi",
                        .token_ids = {1, 2, 3, 4},
                        .ends = {7, 9, 17, 19},
                        .finish = FinishReason::kEndToken};
  AddOutput(answer, part);
  const Json whole = Json::parse(answer.Whole());
  ASSERT_EQ(whole["output"].size(), 2u) << whole;
  EXPECT_EQ(whole["output"][0]["type"], "reasoning");
  EXPECT_EQ(whole["output"][0]["content"],
            Json::parse(R"([{"type": "reasoning_text", "text": "hm"}])"));
  EXPECT_EQ(whole["output"][1]["content"][0]["text"], "Hi");
  EXPECT_EQ(whole["usage"]["output_tokens_details"]["reasoning_tokens"], 1);
  const std::vector<Json> events = EventsIn(answer.TakeEvents());
  EXPECT_EQ(events[2]["type"], "response.reasoning_text.delta");
  EXPECT_EQ(events[3]["type"], "response.reasoning_text.done");
}

TEST(ResponsesAnswer, AnErrorInAStreamIsAnEvent) {
  Told told(R"(, "stream": true)");
  told.answer().TakeEvents();
  const HttpResponse error = OpenAiError(absl::UnavailableError("gone"), OpenAiKind::kResponse);
  EXPECT_EQ(
      told.answer().ErrorEvent(error),
      "event: error\ndata: {\"type\":\"error\",\"sequence_number\":2,\"code\":\"unavailable\","
      "\"message\":\"gone\",\"param\":null}\n\n");
}

TEST(ResponseStore, IsBoundedInBytesAndAge) {
  const Clock::time_point now = Clock::now();
  ResponseStore store({.bytes = 3000, .age = hours(1)});
  const auto keep = [&](const std::string& id, size_t bytes, Clock::time_point at) {
    store.Keep({.id = id, .owner = "ann", .body = std::string(bytes, 'a'), .kept_at = at});
  };
  const auto has = [&](const std::string& id, Clock::time_point at) {
    return store.Find(id, "ann", at) != nullptr;
  };
  keep("a", 1000, now);
  keep("b", 1000, now + std::chrono::minutes(30));
  EXPECT_TRUE(has("a", now) && has("b", now));
  keep("large", 4000, now);
  EXPECT_FALSE(has("large", now));
  EXPECT_TRUE(has("a", now)) << "what is not kept takes no room";
  keep("c", 1000, now + std::chrono::minutes(30));
  EXPECT_FALSE(has("a", now)) << "the oldest made room";
  EXPECT_TRUE(has("b", now) && has("c", now));
  EXPECT_FALSE(store.Delete("b", "bob", now));
  EXPECT_TRUE(store.Delete("b", "ann", now));
  EXPECT_FALSE(store.Delete("b", "ann", now));
  EXPECT_TRUE(has("c", now + std::chrono::minutes(89)));
  EXPECT_FALSE(has("c", now + std::chrono::minutes(90))) << "it is an hour old";
  keep("d", 2500, now + hours(2));
  EXPECT_TRUE(has("d", now + hours(2))) << "the room of all that went is free";
}

// docs/api.md says of every field what becomes of it: those of OpenAI's Python package 3.57
// (types/responses/response_create_params.py), and the sampling parameters that we add.
TEST(ResponsesRequest, TheDocumentHasEveryField) {
  constexpr const char* kNames =
      "access_programs background background_options context_management conversation image include "
      "input instructions max_output_tokens max_tool_calls metadata model moderation "
      "parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_options "
      "prompt_cache_retention reasoning safety_identifier service_tier store stream_options stream "
      "temperature text tool_choice tools top_logprobs top_p truncation user top_k min_p "
      "repetition_penalty presence_penalty frequency_penalty";
  ExpectDocumented("## OpenAI's Responses API", ResponsesFields(), kNames);
}

}  // namespace
}  // namespace treadle
