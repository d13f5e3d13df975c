// Tools in OpenAI's chats, from the request's JSON to the prompt and from the answer's text to
// JSON.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/status.h"
#include "server/openai/openai_answer.h"
#include "server/openai/openai_errors.h"
#include "server/openai/openai_request.h"
#include "tests/server/byte_tokenizer.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

// What real templates do with tools, in short, in both formats that are known, and without any.
const char kHermes[] =
    R"({% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %})"
    R"({% for m in messages %}[{{ m.role }}]{% if m.content is not none %}{{ m.content }})"
    R"({% endif %}{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", )"
    R"("arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %})"
    R"({% if m.role == 'tool' %}({{ m.name }}, {{ m.tool_call_id }}){% endif %}{% endfor %})";
const char kLlama[] =
    R"({% if tools is not none %}{{ tools | length }} tools{% endif %}{% for m in messages %})"
    R"([{{ m.role }}]{% if 'tool_calls' in m %}{{ '{"name": "' + m.tool_calls[0].function.name )"
    R"(+ '", "parameters": ' }}{{ m.tool_calls[0].function.arguments | tojson }}})"
    R"({% else %}{{ m.content }}{% endif %}{% endfor %})";
const char kPlain[] = "{% for m in messages %}{{ m.content }}{% endfor %}";

ServedModel ModelWith(const char* chat_template) {
  ServedModel model;
  model.name = "m";
  model.fingerprint = "fp_1";
  model.vocab = 258;
  model.max_context = 4096;
  model.kv_pages = 512;
  model.page_size = 16;
  model.tokenizer = ByteTokenizer::Make();
  model.end_ids = {ByteTokenizer::kEnd};
  model.chat_template = *ChatTemplate::Parse(chat_template);
  return model;
}

// The prompt, or the error's message.
std::string PromptOf(const ServedModel& model, const std::string& body) {
  const auto read = ReadOpenAiRequest(body, /*chat=*/true, model);
  if (!read.ok())
    return Json::parse(OpenAiError(read.status(), OpenAiKind::kChat).body)["error"]["message"];
  const auto valid = ValidateRequest(read->For(0), model, {}, 1);
  if (!valid.ok())
    return Json::parse(OpenAiError(valid.status(), OpenAiKind::kChat).body)["error"]["message"];
  return model.tokenizer->Decode(valid->spec.prompt, /*special=*/true);
}

const char kTools[] =
    R"("tools": [{"type": "function", "function": {"name": "weather", "description": "now",)"
    R"( "strict": false, "parameters": {"type": "object", "properties": {"city": {}, "at": 1.0}}}},)"
    R"( {"type": "function", "function": {"name": "time"}}])";
const char kConversation[] =
    R"("messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": null,)"
    R"( "refusal": null, "tool_calls": [{"id": "c1", "type": "function", "function": {"name":)"
    R"( "weather", "arguments": "{\"city\": \"Z\u00fcrich\", \"at\": [1, 2.5, null]}"}}]},)"
    R"( {"role": "tool", "tool_call_id": "c1", "content": "sunny"}])";

std::string Body(const std::string& more = kTools, const std::string& messages = kConversation) {
  return "{" + messages + (more.empty() ? "" : ", " + more) + "}";
}

TEST(OpenAiTools, ReachTheTemplateInTheirOrder) {
  const std::string conversation =
      "[user]Hi[assistant]<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": "
      "\"Z\xC3\xBCrich\", \"at\": [1, 2.5, null]}}</tool_call>[tool]sunny(weather, c1)";
  const std::string tools =
      R"(<tools>{"type": "function", "function": {"name": "weather", "description": "now", )"
      R"("strict": false, "parameters": {"type": "object", "properties": {"city": {}, "at": )"
      R"(1.0}}}}{"type": "function", "function": {"name": "time"}}</tools>)";
  const ServedModel hermes = ModelWith(kHermes);
  EXPECT_EQ(PromptOf(hermes, Body()), tools + conversation);
  EXPECT_EQ(PromptOf(hermes, Body(Str(kTools, R"(, "tool_choice": "auto")"))),
            tools + conversation);
  EXPECT_EQ(PromptOf(hermes, Body(Str(kTools, R"(, "tool_choice": "none")"))), conversation);
  EXPECT_EQ(PromptOf(hermes, Body("")), conversation);
  EXPECT_EQ(PromptOf(hermes, Body(R"("tools": [])")), conversation);
  EXPECT_EQ(PromptOf(ModelWith(kLlama), Body()),
            "2 tools[user]Hi[assistant]{\"name\": \"weather\", \"parameters\": {\"city\": "
            "\"Z\xC3\xBCrich\", \"at\": [1, 2.5, null]}}[tool]sunny");
}

TEST(OpenAiTools, WhatIsWrongIsNamed) {
  const ServedModel hermes = ModelWith(kHermes), plain = ModelWith(kPlain);
  const std::string known = "is known (Hermes' and Qwen's and Llama 3's), expected none";
  EXPECT_THAT(PromptOf(plain, Body(kTools, R"("messages": [{"role": "user", "content": "a"}])")),
              testing::AllOf(HasSubstr("tools is given, but the model's chat"), HasSubstr(known)));
  EXPECT_THAT(PromptOf(plain, Body("")), HasSubstr("messages has calls of tools, but"));
  const auto tool = [](const std::string& text) { return R"("tools": [)" + text + "]"; };
  const auto function = [&](const std::string& text) {
    return tool(R"({"type": "function", "function": {)" + text + "}}");
  };
  const std::pair<std::string, std::string> fields[] = {
      {R"("tools": {})", "tools is {}, expected an array of tools"},
      {tool("1"), "tools[0] is 1, expected an object"},
      {tool(R"({"type": "custom"})"), R"(tools[0].type is "custom", expected "function")"},
      {tool(R"({"type": "function"})"), "tools[0].function.name is missing"},
      {function(R"("name": 7)"), "tools[0].function.name is 7, expected a string"},
      {function(R"("name": "f", "returns": 1)"), "tools[0].function.returns is not supported"},
      {function(R"("name": "f", "parameters": [])"),
       "tools[0].function.parameters is [], expected an object"},
      {function(R"("name": "f", "strict": true)"),
       "tools[0].function.strict is true, expected false"},
      {R"("tool_choice": "required")", R"(tool_choice is "required", expected "auto" or "none")"},
      {R"("tool_choice": {"type": "function", "function": {"name": "f"}})",
       R"(tool_choice is {"function":{"name":"f"},"type":"function"}, expected)"},
      {R"("parallel_tool_calls": 1)", "parallel_tool_calls is 1, expected true or false"}};
  for (const auto& [field, message] : fields) {
    EXPECT_THAT(PromptOf(hermes, Body(field)), HasSubstr(message)) << field;
  }
  const std::pair<std::string, std::string> messages[] = {
      {R"({"role": "assistant"})", "messages[0].content is missing"},
      {R"({"role": "user", "content": "a", "tool_calls": []})",
       "messages[0].tool_calls is not supported in a message of this role"},
      {R"({"role": "tool", "content": "a"})", "messages[0].tool_call_id is missing"},
      {R"({"role": "assistant", "tool_calls": [{"type": "function"}]})",
       "messages[0].tool_calls[0].id is missing"},
      {R"({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]})",
       "messages[0].tool_calls[0].function.arguments is missing"},
      {R"({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f",
           "arguments": "{1}"}}]})",
       "messages[0].tool_calls[0].function.arguments: is not valid JSON at byte 2"},
      {R"({"role": "ipython", "content": "a"})", "role is 'ipython', expected system, user, assis"},
      {R"({"content": "a"})", "messages[0].role is null, expected a string"}};
  for (const auto& [message, error] : messages) {
    EXPECT_THAT(PromptOf(hermes, Body("", R"("messages": [)" + message + "]")), HasSubstr(error));
  }
}

class Told {
 public:
  Told(const ServedModel& model, const std::string& more)
      : request_(*ReadOpenAiRequest(Body(kTools + more), true, model)),
        answer_(model, request_, "id", 5) {
    EXPECT_TRUE(request_.common.special_tokens);
  }
  OpenAiAnswer& answer() { return answer_; }
  OpenAiAnswer& Output(const std::string& text, FinishReason finish = FinishReason::kNone) {
    const OutputPart part{.text = text, .finish = finish};
    SessionEvent event;
    event.output = &part;
    answer_.Add(0, event);
    return answer_;
  }
  // The only choice of the whole answer.
  Json Choice() const { return Json::parse(answer_.Whole())["choices"][0]; }

 private:
  const OpenAiRequest request_;
  OpenAiAnswer answer_;
};

TEST(OpenAiTools, AWholeAnswerHasItsCalls) {
  const ServedModel hermes = ModelWith(kHermes);
  Told told(hermes, "");
  told.Output("I look.\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"B\"}}");
  told.Output("</tool_call>\n<tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>",
              FinishReason::kEndToken);
  EXPECT_EQ(told.Choice(), Json::parse(R"({
      "index": 0, "finish_reason": "tool_calls", "stop_reason": -1, "logprobs": null,
      "message": {"role": "assistant", "content": "I look.", "refusal": null, "tool_calls": [
        {"id": "call_id_0", "type": "function",
         "function": {"name": "weather", "arguments": "{\"city\": \"B\"}"}},
        {"id": "call_id_1", "type": "function",
         "function": {"name": "time", "arguments": "{}"}}]}})"));

  const ServedModel llama = ModelWith(kLlama);
  Told alone(llama, R"(, "parallel_tool_calls": false)");
  alone.Output(R"({"name": "time", "parameters": {}}; {"name": "time", "parameters": {}})",
               FinishReason::kEndToken);
  EXPECT_EQ(alone.Choice()["message"]["content"], Json());
  EXPECT_EQ(alone.Choice()["message"]["tool_calls"].size(), 1u);

  for (const std::string text : {R"({"name": "time", "parameters": {)", "It is ten."}) {
    Told none(llama, "");
    none.Output(text, FinishReason::kLength);
    EXPECT_EQ(none.Choice()["message"],
              Json({{"role", "assistant"}, {"content", text}, {"refusal", nullptr}}));
    EXPECT_EQ(none.Choice()["finish_reason"], "length");
  }
}

TEST(OpenAiTools, AStreamTellsNameThenArguments) {
  const ServedModel hermes = ModelWith(kHermes);
  Told told(hermes, R"(, "stream": true)");
  const auto chunk = [&](const std::string& delta, const std::string& finish = "null") {
    return R"(data: {"id":"id","object":"chat.completion.chunk","created":5,"model":"m",)"
           R"("system_fingerprint":"fp_1","choices":[{"index":0,"delta":)" +
           delta + R"(,"logprobs":null,"finish_reason":)" + finish + "}]}\n\n";
  };
  const auto call = [&](int index, const std::string& rest) {
    return chunk(Str(R"({"tool_calls":[{"index":)", index, ",", rest, "}]}"));
  };
  EXPECT_EQ(told.Output("Ah \n").TakeEvents(),
            chunk(R"({"role":"assistant","content":""})") + chunk(R"({"content":"Ah"})"));
  EXPECT_EQ(told.Output("<tool_call>{\"name\": \"time\", \"arg").TakeEvents(), "");
  EXPECT_EQ(
      told.Output("uments\": {\"a\": 1}}").TakeEvents(),
      call(0, R"("id":"call_id_0","type":"function","function":{"name":"time","arguments":""})") +
          call(0, R"("function":{"arguments":"{\"a\": 1}"})"));
  EXPECT_EQ(told.Output("</tool_call>").TakeEvents(), "");
  EXPECT_EQ(
      told.Output("<tool_call>{\"name\":\"f\",\"arguments\":{}}", FinishReason::kEndToken)
          .TakeEvents(),
      call(1, R"("id":"call_id_1","type":"function","function":{"name":"f","arguments":""})") +
          call(1, R"("function":{"arguments":"{}"})") +
          chunk("{}", R"("tool_calls","stop_reason":-1)"));
}

}  // namespace
}  // namespace treadle
