// Calls in the syntaxes of model families, cut everywhere. The answers are as the models' chat
// templates write calls, and as the pages and tests of vLLM's tool parsers and mistral-common show
// them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/status.h"
#include "server/openai/tools/reasoning.h"
#include "server/openai/tools/tool_calls.h"
#include "tests/server/openai/cut_answers.h"

namespace treadle {
namespace {

const TextParameters kTexts = {{"f", {"city", "code"}}, {"get_weather", {"location"}}};

std::string Read(const ToolFormat* format, const std::string& answer, bool parallel = true) {
  EXPECT_NE(format, nullptr);
  return ReadHoweverCut(answer, [&](const auto& pieces) {
    ToolCallReader reader(*format, parallel, kTexts);
    ToolText all;
    for (const std::string_view piece : pieces) Add(reader.Push(piece), all);
    Add(reader.Finish(), all);
    for (const ToolCall& call : all.calls) {
      EXPECT_TRUE(nlohmann::json::parse(call.arguments).is_object());
    }
    return Shown(all);
  });
}

struct Row {
  const char* name;
  const char* in_template;  // what shows the format
  std::string call, shown;
  std::string next;  // between two calls
  std::string around[2] = {};
};

const Row kRows[] = {
    {"Qwen3-Coder", "<tool_call>\n<function=example>\n<parameter=p>",
     "<tool_call>\n<function=f>\n<parameter=city>\n12\n</parameter>\n<parameter=n>\n12\n"
     "</parameter>\n<parameter=code>\nif (a < b) {\n  x = \"</p>\";\n}\n</parameter>\n"
     "<parameter=list>\n[1, {\"a\": null}]\n</parameter>\n<parameter=odd>\nTrue story\n"
     "</parameter>\n</function>\n</tool_call>",
     R"(|f({"city": "12", "n": 12, "code": "if (a < b) {\n  x = \"</p>\";\n}", )"
     R"("list": [1, {"a": null}], "odd": "True story"}))",
     "\n"},
    {"GLM 4.5", "<tool_call>{function-name}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>",
     "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key>\n"
     "<arg_value>12</arg_value>\n</tool_call>",
     R"(|f({"city": "12", "n": 12}))", "\n"},
    {"GLM, no JSON", "<arg_key>k</arg_key>\n<arg_value>v</arg_value>",
     "<tool_call>g\n<arg_key>n</arg_key>\n<arg_value>1, \"x\": 2</arg_value>\n</tool_call>",
     R"(|g({"n": "1, \"x\": 2"}))", "\n"},
    {"GLM 4.7", "<tool_call>{function-name}<arg_key>k</arg_key><arg_value>v</arg_value>",
     "<tool_call>g</tool_call>", "|g({})", ""},
    {"DeepSeek V3",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>",
     "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"location\": \"Tokyo "
     "```\"}\n```<｜tool▁call▁end｜>",
     R"(|get_weather({"location": "Tokyo ```"}))",
     "\n",
     {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"}},
    {"DeepSeek V3.1",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>",
     "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"location\": \"Tokyo ```\"}"
     "<｜tool▁call▁end｜>",
     R"(|get_weather({"location": "Tokyo ```"}))",
     "",
     {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"}},
    {"Mistral 7B v0.3", "[TOOL_CALLS] [",
     "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"city\": \"[ARGS] ]\"}}, {\"name\": \"g\", "
     "\"arguments\": {}}]",
     R"(|f({"city": "[ARGS] ]"})|g({}))", "\n"},
    {"Mistral Small 3.2", "[TOOL_CALLS]name[ARGS]", "[TOOL_CALLS]f[ARGS]{\"city\": \"Paris\"}",
     R"(|f({"city": "Paris"}))", ""},
    {"Mistral, with ids", "[TOOL_CALLS]name[CALL_ID]", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}",
     "|f({})", ""},
    {"Gemma 4", "<|tool_call>call:",
     "<|tool_call>call:get_weather{location:<|\"|>San {Francisco}, CA<|\"|>,n:42,x:-1.5,ok:true,"
     "none:null,nested:{a:[<|\"|>b<|\"|>,{}],c:[]},unit:celsius}<tool_call|>",
     R"(|get_weather({"location": "San {Francisco}, CA", "n": 42, "x": -1.5, "ok": true, )"
     R"("none": null, "nested": {"a": ["b", {}], "c": []}, "unit": "celsius"}))",
     ""},
    {"FunctionGemma", "<start_function_call>call:",
     "<start_function_call>call:get_weather{location:<escape>Paris<escape>}<end_function_call>",
     R"(|get_weather({"location": "Paris"}))", ""},
    {"Kimi K2",
     "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
     "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"location\": "
     "\"Paris {\"}<|tool_call_end|>",
     R"(|get_weather({"location": "Paris {"}))",
     "",
     {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"}},
    {"LFM2.5", "<|tool_call_start|>[' + calls + ']<|tool_call_end|>",
     "<|tool_call_start|>[get_weather(location='it\'s \"there\"', n=-1.5, ok=True, none=None, "
     "deep={\"a\": [1, 'b\\n', {}], 'c': false}, unit=celsius), g()]<|tool_call_end|>",
     R"(|get_weather({"location": "it's \"there\"", "n": -1.5, "ok": true, "none": null, )"
     R"("deep": {"a": [1, "b\n", {}], "c": false}, "unit": "celsius"})|g({}))",
     "\n"},
    {"LFM2.5, one call", "<|tool_call_start|>[' + calls + ']<|tool_call_end|>",
     "<|tool_call_start|>f(city=\"Be)rn\")<|tool_call_end|>", R"(|f({"city": "Be)rn"}))", ""},
    {"LFM2.5, asked for JSON", "<|tool_call_start|>[' + calls + ']<|tool_call_end|>",
     "<|tool_call_start|>[{\"name\": \"f\", \"arguments\": {\"city\": \"a\"}}]<|tool_call_end|>",
     R"(|f({"city": "a"}))", ""},
};

TEST(ToolFormats, CallsAreReadAsTheModelsWriteThem) {
  for (const Row& row : kRows) {
    SCOPED_TRACE(row.name);
    const ToolFormat* const format = FindToolFormat(row.in_template);
    const auto& [begin, end] = row.around;
    EXPECT_EQ(Read(format, begin + row.call + end), row.shown);
    EXPECT_EQ(Read(format, "I look.\n\n" + begin + row.call + row.next + row.call + end + "\n"),
              "I look." + row.shown + row.shown);
    EXPECT_EQ(Read(format, begin + row.call + row.next + row.call + end, /*parallel=*/false),
              row.shown.substr(0, row.shown.find("|g(", 1)));
    EXPECT_EQ(Read(format, "1 < 2 [a] <tool"), "1 < 2 [a] <tool");
  }
}

// Templates of Kimi K2 want it back.
TEST(ToolFormats, OfKimiTheIdIsTheModelsOwn) {
  const Calls calls = KimiCalls("functions.f:12<|tool_call_argument_begin|>{}", {});
  ASSERT_TRUE(calls);
  EXPECT_EQ(calls->front().id, "functions.f:12");
}

// Such as by max_tokens. Nothing is told as a call that is not whole.
TEST(ToolFormats, ACallThatIsCutOffIsText) {
  for (const Row& row : kRows) {
    SCOPED_TRACE(row.name);
    const ToolFormat* const format = FindToolFormat(row.in_template);
    const std::string end = row.call.ends_with("</tool_call>") ? "\n</tool_call>" : "x";
    for (size_t size = 1; size + end.size() < row.call.size(); ++size) {
      const std::string cut = row.around[0] + row.call.substr(0, size);
      EXPECT_EQ(Read(format, cut), cut);
    }
  }
}

TEST(ToolFormats, WhatIsNoCallIsText) {
  const std::pair<const char*, const char*> rows[] = {
      {"<function= <parameter=", "<function=f>\n<parameter=a>1</parameter> more\n</function>"},
      {"<function= <parameter=", "<function=f\n</function>"},
      {"<arg_key> <arg_value>", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>"},
      {"<arg_key> <arg_value>", "<tool_call></tool_call>"},
      {"<｜tool▁call▁begin｜><｜tool▁sep｜>", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>"},
      {"<｜tool▁call▁begin｜><｜tool▁sep｜>",
       "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{]<｜tool▁call▁end｜>"},
      {"[TOOL_CALLS]", "[TOOL_CALLS] []"},
      {"[TOOL_CALLS]", "[TOOL_CALLS] [{\"name\": 1}]"},
      {"[TOOL_CALLS]", "[TOOL_CALLS]{\"a\": 1}"},
      {"<|tool_call>call:", "<|tool_call>f{}<tool_call|>"},
      {"<|tool_call>call:", "<|tool_call>call:f{a:}<tool_call|>"},
      {"<|tool_call>call:", "<|tool_call>call:f{a:1 b}x<tool_call|>"},
      {"<|tool_call>call:", "<|tool_call>call:f{a:<|\"|>}<tool_call|>"},
  };
  for (const auto& [in_template, answer] : rows) {
    EXPECT_EQ(Read(FindToolFormat(in_template), answer), answer);
  }
  std::string deep = "<|tool_call>call:f";
  for (int i = 0; i < 100000; ++i) deep += "{a:";
  ToolCallReader reader(*FindToolFormat("<|tool_call>call:"), true);
  EXPECT_TRUE(reader.Push(deep + "<tool_call|>").calls.empty());
}

// Mistral's templates refuse other ids (mistral-common, is_valid_id: nine letters and digits).
TEST(ToolFormats, IdsAreAsTheTemplateTakesThem) {
  const ToolFormat& mistral = *FindToolFormat("[TOOL_CALLS]");
  EXPECT_THAT(mistral.CallId("chatcmpl-1", 0), testing::MatchesRegex("[a-z0-9]{9}"));
  EXPECT_NE(mistral.CallId("chatcmpl-1", 0), mistral.CallId("chatcmpl-1", 1));
  EXPECT_NE(mistral.CallId("chatcmpl-1", 0), mistral.CallId("chatcmpl-2", 0));
  EXPECT_EQ(GenericToolFormat().CallId("chatcmpl-1", 0), "call_chatcmpl-1_0");
}

// An answer that is held to calls is JSON, whatever the model's own syntax.
TEST(ToolFormats, WhatIsHeldIsJson) {
  for (const Row& row : kRows) {
    EXPECT_EQ(&FindToolFormat(row.in_template)->Held(), &GenericToolFormat()) << row.name;
  }
  EXPECT_EQ(&GenericToolFormat().Held(), &GenericToolFormat());
}

}  // namespace
}  // namespace treadle
