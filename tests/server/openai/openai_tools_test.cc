// Tools in OpenAI's chats, from the request's JSON to the prompt and from the answer's text to
// JSON.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <set>

#include "base/status.h"
#include "engine/plan/iteration_plan.h"
#include "server/constraint/constraint_compiler.h"
#include "server/openai/openai_answer.h"
#include "server/openai/openai_errors.h"
#include "server/openai/openai_request.h"
#include "tests/server/byte_tokenizer.h"
#include "tests/server/openai/chat_model.h"
#include "tests/server/without_xgrammar.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

// Use of tools by real templates, in short, in both formats that are known, and without any.
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
const char kPlain[] = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
const char kMistral[] = "[TOOL_CALLS]{{ tools }}{{ messages[0].content }}";

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
    R"( "refusal": null, "tool_calls": [{"id": "c1", "index": 0, "type": "function", "function": {)"
    R"("name": "weather", "arguments": "{\"city\": \"Z\u00fcrich\", \"at\": [1, 2.5, null]}",)"
    R"( "parsed_arguments": {"city": "Z"}}}]},)"
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
  const ServedModel hermes = ChatModel(kHermes);
  EXPECT_EQ(PromptOf(hermes, Body()), tools + conversation);
  EXPECT_EQ(PromptOf(hermes, Body(Str(kTools, R"(, "tool_choice": "auto")"))),
            tools + conversation);
  EXPECT_EQ(PromptOf(hermes, Body(Str(kTools, R"(, "tool_choice": "none")"))), conversation);
  EXPECT_EQ(PromptOf(hermes, Body("")), conversation);
  EXPECT_EQ(PromptOf(hermes, Body(R"("tools": [])")), conversation);
  EXPECT_EQ(PromptOf(ChatModel(kLlama), Body()),
            "2 tools[user]Hi[assistant]{\"name\": \"weather\", \"parameters\": {\"city\": "
            "\"Z\xC3\xBCrich\", \"at\": [1, 2.5, null]}}[tool]sunny");
}

// A text that is empty is one; none and what is left out are none.
TEST(OpenAiTools, CallsMayComeWithoutContent) {
  const ServedModel model =
      ChatModel(Str("{% if false %}", kHermes, "{% endif %}{{ messages[0].content is none }}",
                    "{{ messages[0].tool_calls | length }}")
                    .c_str());
  for (const auto& [content, prompt] :
       {std::pair("", "True1"), std::pair(R"("content": null,)", "True1"),
        std::pair(R"("content": "",)", "False1")}) {
    EXPECT_EQ(
        PromptOf(model, Body("", Str(R"("messages": [{"role": "assistant", )", content,
                                     R"("tool_calls": [{"id": "1", "type": "function",)"
                                     R"( "function": {"name": "f", "arguments": "{}"}}]}])"))),
        prompt)
        << content;
  }
}

// Templates that know no tools: the second one refuses a system's message and turns out of order,
// as Gemma 2's and Mistral's first ones.
TEST(OpenAiTools, ReachAnyTemplateAsText) {
  const std::string tools =
      "# Tools\n\nYou may call functions. Each line describes one, with a JSON schema of its "
      "parameters:\n"
      R"({"name":"weather","description":"now","strict":false,"parameters":{"type":"object",)"
      R"("properties":{"city":{},"at":1.0}}})"
      "\n{\"name\":\"time\"}\n\nTo call a function, write its name and its arguments as JSON, like "
      "this:\n<tool_call>\n{\"name\": \"NAME\", \"arguments\": {\"PARAMETER\": "
      "\"VALUE\"}}\n</tool_call>\nThe results come back between <tool_response> and "
      "</tool_response>.";
  const std::string call =
      "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Z\xC3\xBCrich\", \"at\": "
      "[1, "
      "2.5, null]}}\n</tool_call>";
  const std::string talk =
      "[user]Hi[assistant]" + call + "[user]<tool_response>\nsunny\n</tool_response>";
  const ServedModel plain = ChatModel(kPlain);
  EXPECT_EQ(PromptOf(plain, Body()), "[system]" + tools + talk);
  EXPECT_EQ(PromptOf(plain, Body("")), talk);
  EXPECT_EQ(PromptOf(plain, Body(Str(kTools, R"(, "tool_choice": "none")"))), talk);
  EXPECT_EQ(PromptOf(plain, Body(kTools, R"("messages": [{"role": "system", "content": "Be."},
                                             {"role": "user", "content": "Hi"}])")),
            "[system]Be.\n\n" + tools + "[user]Hi");
  const ServedModel strict = ChatModel(
      "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
      "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
      "{% endfor %}");
  EXPECT_EQ(
      PromptOf(strict, Body(kTools, R"("messages": [{"role": "user", "content": "Hi"},
      {"role": "assistant", "content": "Ah.", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "time", "arguments": ""}}]},
      {"role": "tool", "tool_call_id": "1", "content": "1"},
      {"role": "tool", "tool_call_id": "2", "content": "2"},
      {"role": "user", "content": "So?"}])")),
      "[user]" + tools +
          "\n\nHi[assistant]Ah.\n<tool_call>\n{\"name\": \"time\", \"arguments\": "
          "{}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>"
          "[user]<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\nSo?");
}

TEST(OpenAiTools, WhatIsWrongIsNamed) {
  const ServedModel hermes = ChatModel(kHermes);
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
      {function(R"("name": "f", "strict": 1)"), "tools[0].function.strict is 1, expected true or"},
      {R"("tool_choice": "required")", "tool_choice is a demand for a call, expected tools"},
      {R"("tool_choice": "any")", R"(tool_choice is "any", expected "auto", "none", "required")"},
      {R"("tool_choice": {"type": "function"})", "tool_choice.function.name is missing"},
      {R"("tool_choice": {"type": "allowed_tools"})", R"(tool_choice.type is "allowed_tools")"},
      {Str(kTools, R"(, "tool_choice": {"type": "function", "function": {"name": "f"}})"),
       R"(tool_choice.function.name is "f", expected one of tools)"},
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

// Text of a model that is held to a request's constraint, and otherwise writes anything, but
// begins with `begin`. Empty: it did not come to an end.
class AnyAnswer {
 public:
  AnyAnswer(const ServedModel& model, const OpenAiRequest& request) : model_(model) {
    const auto valid = ValidateRequest(request.For(0), model, {}, 1);
    EXPECT_EQ(valid.status(), absl::OkStatus());
    if (valid.ok()) grammar_ = valid->spec.constraint;
  }
  // False: text that begins so is not allowed.
  bool Begin(const std::string& begin) {
    state_ = grammar_->Begin();
    text_ = begin;
    return std::ranges::all_of(
        begin, [this](const char c) { return state_->Accept(static_cast<unsigned char>(c)).ok(); });
  }
  std::string GoOn(std::minstd_rand& random) {
    std::vector<uint32_t> mask(MaskWords(model_.vocab));
    for (int i = 0; i < 4000; ++i) {
      EXPECT_EQ(state_->FillMask(mask), absl::OkStatus());
      std::vector<int32_t> allowed;
      for (int32_t id = 0; id < model_.vocab; ++id) {
        if ((mask[id / 32] >> (id % 32) & 1) != 0) allowed.push_back(id);
      }
      const int32_t token = allowed[random() % allowed.size()];
      if (token == ByteTokenizer::kEnd) return text_;
      EXPECT_EQ(state_->Accept(token), absl::OkStatus());
      text_ += static_cast<char>(token);
    }
    return "";
  }
  explicit operator bool() const { return grammar_ != nullptr; }

 private:
  const ServedModel& model_;
  std::shared_ptr<const ConstraintGrammar> grammar_;
  std::unique_ptr<TokenConstraint> state_;
  std::string text_;
};

class HeldCalls : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    model_.constraints =
        ConstraintCompiler::Create(*model_.tokenizer, model_.vocab, model_.end_ids);
    const auto works = model_.constraints->Compile({.kind = Constraint::Kind::kJsonObject});
    if (IsWithoutXGrammar(works.status().ToString())) GTEST_SKIP() << kWithoutXGrammar;
    ASSERT_EQ(works.status(), absl::OkStatus());
  }
  static std::string Asking(const std::string& more, bool strict = false) {
    return Body(Str(R"("tools": [{"type": "function", "function": {"name": "weather", "strict": )",
                    strict ? "true" : "false", R"(, "parameters": {"type": "object", )",
                    R"("properties": {"city": {"enum": ["B", "A"]}, "at": {"type": "integer"}}, )",
                    R"("required": ["city"], "additionalProperties": false}}}, )",
                    R"({"type": "function", "function": {"name": "time"}}])", more));
  }
  // The calls in an answer; what is beside them is in `content`.
  std::vector<ToolCall> CallsIn(const OpenAiRequest& request, const std::string& text,
                                std::string& content) {
    ToolCallReader reader(*request.reading.tools, request.reading.parallel);
    ToolText all = reader.Push(text);
    content = all.content + reader.Finish().content;
    return all.calls;
  }
  static void ExpectFits(const ToolCall& call) {
    const Json arguments = Json::parse(call.arguments);
    if (call.name == "time") {
      EXPECT_EQ(arguments, Json::object());
      return;
    }
    EXPECT_EQ(call.name, "weather");
    EXPECT_TRUE(arguments.value("city", "") == "A" || arguments.value("city", "") == "B");
    EXPECT_EQ(arguments.size(), 1u + arguments.count("at"));
    if (arguments.contains("at")) {
      EXPECT_TRUE(arguments["at"].is_number_integer());
      EXPECT_LT(call.arguments.find("city"), call.arguments.find("\"at"));  // the schema's order
    }
  }

  ServedModel model_ = ChatModel(GetParam());
  std::minstd_rand random_{7};
};

TEST_P(HeldCalls, ADemandedCallIsAllThereIsAndFits) {
  struct Row {
    const char* more;
    const char* only;  // this function; null: any
    bool one;
  };
  const Row rows[] = {
      {R"(, "tool_choice": "required")", nullptr, false},
      {R"(, "tool_choice": "required", "parallel_tool_calls": false)", nullptr, true},
      {R"(, "tool_choice": "required", "response_format": {"type": "json_object"})", nullptr,
       false},
      {R"(, "tool_choice": {"type": "function", "function": {"name": "time"}})", "time", true}};
  for (const Row& row : rows) {
    ASSERT_OK_AND_ASSIGN(const auto request, ReadOpenAiRequest(Asking(row.more), true, model_));
    AnyAnswer answer(model_, request);
    ASSERT_TRUE(answer);
    EXPECT_FALSE(answer.Begin("I look."));
    size_t most = 0;
    std::set<std::string> names;
    for (int i = 0; i < 20; ++i) {
      answer.Begin("");
      std::string content;
      const auto calls = CallsIn(request, answer.GoOn(random_), content);
      EXPECT_EQ(content, "");
      ASSERT_GE(calls.size(), 1u);
      most = std::max(most, calls.size());
      for (const ToolCall& call : calls) {
        names.insert(call.name);
        ExpectFits(call);
      }
    }
    EXPECT_EQ(most > 1, !row.one);
    EXPECT_EQ(names, row.only != nullptr ? std::set<std::string>{row.only}
                                         : (std::set<std::string>{"time", "weather"}));
  }
}

TEST_P(HeldCalls, AFormOfAnswersLeavesRoomForCalls) {
  ASSERT_OK_AND_ASSIGN(
      const auto request,
      ReadOpenAiRequest(
          Asking(R"(, "response_format": {"type": "json_schema", "json_schema": {"name": "n", )"
                 R"("schema": {"type": "object", "properties": {"sum": {"type": "integer"}}, )"
                 R"("required": ["sum"], "additionalProperties": false}}})",
                 /*strict=*/true),
          true, model_));
  AnyAnswer answer(model_, request);
  ASSERT_TRUE(answer);
  std::string content;
  ASSERT_TRUE(answer.Begin("{\"sum\""));
  EXPECT_TRUE(CallsIn(request, answer.GoOn(random_), content).empty());
  EXPECT_TRUE(Json::parse(content)["sum"].is_number_integer());
  ASSERT_TRUE(answer.Begin(request.reading.tools->Begin("weather")));
  const auto calls = CallsIn(request, answer.GoOn(random_), content);
  EXPECT_EQ(content, "");
  ASSERT_GE(calls.size(), 1u);
  ExpectFits(calls[0]);
}

TEST_P(HeldCalls, AStrictToolsCallsFitAmongText) {
  const auto request = ReadOpenAiRequest(Asking("", /*strict=*/true), true, model_);
  if (GetParam() == kLlama || GetParam() == kMistral) {
    EXPECT_THAT(std::string(request.status().message()),
                testing::StartsWith("tools[0].function.strict is true, expected false unless"));
    return;
  }
  ASSERT_EQ(request.status(), absl::OkStatus());
  AnyAnswer answer(model_, *request);
  ASSERT_TRUE(answer);
  EXPECT_FALSE(answer.Begin("I look.<tool_call>{}"));
  EXPECT_FALSE(answer.Begin("<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"C"));
  ASSERT_TRUE(
      answer.Begin("I look.<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"B\"}"
                   "}\n</tool_call>"));
  std::string content;
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(answer.Begin("I look. <tool_call>"));
    const std::string text = answer.GoOn(random_);
    // Not every reader has room for a large exponent.
    if (text.empty() || std::regex_search(text, std::regex("[eE][+-]?[0-9]{3}"))) continue;
    const auto calls = CallsIn(*request, text, content);
    ASSERT_GE(calls.size(), 1u) << text;
    EXPECT_THAT(content, testing::StartsWith("I look."));
    if (calls[0].name == "weather") ExpectFits(calls[0]);
  }
}

TEST_P(HeldCalls, ASchemaThatCannotBeEnforcedIsNamed) {
  std::string body = Asking(R"(, "tool_choice": "required")");
  body.replace(body.find(R"("integer")"), 9, R"("integer", "not": {})");
  EXPECT_THAT(PromptOf(model_, body),
              testing::AllOf(HasSubstr("tools: tools[0].function.parameters: the keyword not"),
                             HasSubstr("cannot be enforced")));
}

INSTANTIATE_TEST_SUITE_P(Formats, HeldCalls, testing::Values(kHermes, kLlama, kPlain, kMistral));

// With no wish at all a call that begins is one that fits.
TEST(OpenAiTools, WhoWasNeverTaughtToCallIsHeldToIt) {
  ServedModel model = ChatModel(kPlain);
  model.constraints = ConstraintCompiler::Create(*model.tokenizer, model.vocab, model.end_ids);
  if (!model.constraints->Works()) GTEST_SKIP() << kWithoutXGrammar;
  const auto request = ReadOpenAiRequest(
      Body(R"("tools": [{"type": "function", "function": {"name": "weather", "parameters":
              {"type": "object", "properties": {"city": {"enum": ["A", "B"]}},
               "required": ["city"], "additionalProperties": false}}},
             {"type": "function", "function": {"name": "odd", "parameters": {"not": {}}}}])"),
      true, model);
  ASSERT_EQ(request.status(), absl::OkStatus());
  AnyAnswer answer(model, *request);
  const std::string begin = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": ";
  EXPECT_TRUE(answer.Begin("I look. " + begin + "\"B\"}}\n</tool_call>"));
  EXPECT_FALSE(answer.Begin("I look. " + begin + "\"C\"}}"));
  EXPECT_FALSE(answer.Begin("I look. <tool_call>\n{\"name\": \"other"));
  EXPECT_TRUE(answer.Begin("<tool_call>\n{\"name\": \"odd\", \"arguments\": {\"x\": 1}}"));
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
  const ServedModel hermes = ChatModel(kHermes);
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

  const ServedModel llama = ChatModel(kLlama);
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
  const ServedModel hermes = ChatModel(kHermes);
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
