// Calls of tools in answers, however they arrive.
#include "server/openai/tools/tool_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "tests/server/openai/cut_answers.h"

namespace treadle {
namespace {

const ToolFormat& Hermes() { return *FindToolFormat(R"(<tool_call>{"name": "f"}</tool_call>)"); }
const ToolFormat& Llama() { return *FindToolFormat(R"('{"name": "' + f + '", "parameters": ')"); }

std::string Read(const ToolFormat& format, const std::string& answer, bool parallel = true) {
  return ReadHoweverCut(answer, [&](const auto& pieces) {
    ToolCallReader reader(format, parallel);
    ToolText all;
    for (const std::string_view piece : pieces) Add(reader.Push(piece), all);
    Add(reader.Finish(), all);
    EXPECT_EQ(reader.called(), !all.calls.empty());
    return Shown(all);
  });
}

TEST(ToolCalls, TheTemplateShowsTheFormat) {
  EXPECT_EQ(Hermes().open, "<tool_call>");
  EXPECT_EQ(Llama().open, "<|python_tag|>");
  for (const char* other : {"", "{{ messages }}"}) {
    EXPECT_EQ(FindToolFormat(other), nullptr) << other;
  }
}

TEST(ToolCalls, HermesAndQwen) {
  EXPECT_EQ(
      Read(Hermes(), "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>"),
      "|f({\"a\": 1})");
  EXPECT_EQ(Read(Hermes(),
                 " I look <b> it up.\n\n<tool_call>{\"arguments\": {\"z\":\"}{\\\"\\\\\", "
                 "\"a\": [{}]}, \"name\": \"f\"}</tool_call>\n<tool_call>\n{\"name\": "
                 "\"g\", \"arguments\": {}}\n</tool_call>\n"),
            " I look <b> it up.|f({\"z\":\"}{\\\"\\\\\", \"a\": [{}]})|g({})");
  EXPECT_EQ(Read(Hermes(),
                 "<tool_call>{\"name\": \"f\", \"arguments\": {\"t\": \"</tool_call>\"}}"
                 "</tool_call> Done. "),
            "Done. |f({\"t\": \"</tool_call>\"})");
  EXPECT_EQ(Read(Hermes(), "{\"name\": \"f\", \"arguments\": {}} \n"),
            "{\"name\": \"f\", \"arguments\": {}} \n");
}

TEST(ToolCalls, Llama) {
  EXPECT_EQ(Read(Llama(), "{\"name\": \"f\", \"parameters\": {\"a\": \"\xC3\xA9\"}}"),
            "|f({\"a\": \"\xC3\xA9\"})");
  EXPECT_EQ(Read(Llama(),
                 "\n<|python_tag|> {\"name\": \"f\", \"parameters\": {}}; "
                 "<|python_tag|>{\"name\": \"g\", \"arguments\": {\"b\": {}}}"),
            "|f({})|g({\"b\": {}})");
  EXPECT_EQ(Read(Llama(), "Sure: {\"name\": \"f\", \"parameters\": {}}"),
            "Sure: {\"name\": \"f\", \"parameters\": {}}");
  EXPECT_EQ(Read(Llama(), "<|python_tag|>f.call(x=\"y\")"), "<|python_tag|>f.call(x=\"y\")");
}

TEST(ToolCalls, WhatIsNoCallIsText) {
  for (const std::string answer :
       {"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}",  // cut off
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {'a': 1}}\n</tool_call>",
        "a <tool_call>{\"name\": \"f\", \"arguments\": \"x\"}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": \"[1]\"}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"args\": {}}</tool_call>",
        "<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call> b\n",
        "<tool_call>{\"arguments\": {}}</tool_call>", "<tool_call>f</tool_call>", "  <tool_",
        "<tool_call>  ", "  \n", "", "<<tool_call", "1 < 2 <tool"}) {
    EXPECT_EQ(Read(Hermes(), answer), answer);
  }
  for (const std::string answer :
       {"{\"answer\": {\"name\": \"f\"}}", "{\"name\": \"f\", \"parameters\": {}", " <|pyth",
        "{\"answer\": 1} {\"name\": \"f\", \"parameters\": {}}", "{\"name\": \"f\"}; {"}) {
    EXPECT_EQ(Read(Llama(), answer), answer);
  }
  EXPECT_EQ(Read(Hermes(),
                 "<tool_call>{]}</tool_call>\n<tool_call>{\"name\": \"f\", "
                 "\"arguments\": {}}</tool_call>"),
            "<tool_call>{]}</tool_call>|f({})");
}

TEST(ToolCalls, AsSmallModelsWriteThem) {
  const std::pair<std::string, std::string> calls[] = {
      {R"({"name": "f"})", "{}"},
      {R"({"name": "f", "arguments": null})", "{}"},
      {R"({"name": "f", "arguments": ""})", "{}"},
      {R"({"name": "f", "parameters": " \n"})", "{}"},
      {R"({"name": "f", "arguments": "{\"a\": \"\\\"}{\"}"})", R"({"a": "\"}{"})"},
      {R"({"name": "f", "arguments": " {} "})", " {} "},
      {R"({"name": "f", "arguments": {"z": 1, "b": [{"c": 1, "c": 2}], "z": {}}})",
       R"({"z":{},"b":[{"c":2}]})"},
      {R"({"name": "g", "arguments": {"a": 1}, "name": "f", "arguments": {"a": 1.0}})",
       R"({"a":1.0})"},
      {R"({"name": "f", "arguments": "{\"a\": 1, \"a\": 2}"})", R"({"a":2})"}};
  for (const auto& [call, arguments] : calls) {
    EXPECT_EQ(Read(Hermes(), "<tool_call>" + call + "</tool_call>"), "|f(" + arguments + ")");
    EXPECT_EQ(Read(Llama(), "<|python_tag|>" + call), "|f(" + arguments + ")");
    // Without a mark, a name alone might be anybody's.
    EXPECT_EQ(Read(Llama(), call), call == calls[0].first ? call : "|f(" + arguments + ")");
  }
}

// docs/api.md says that these are text.
TEST(ToolCalls, WhatReadersOfJsonTakeDifferentlyIsText) {
  const auto deep = [](int levels) {
    return std::string(levels - 2, '[') + std::string(levels - 2, ']');
  };
  EXPECT_EQ(Read(Hermes(), R"(<tool_call>{"name": "f", "arguments": {"a": )" + deep(64) + "}}"),
            R"(|f({"a": )" + deep(64) + "})");
  for (const std::string& value :
       {deep(65), deep(80), std::string(R"("\ud800")"), std::string(R"("\udc00 x")"),
        std::string("1e999"), std::string("{\"b\": 1, \"b\": ") + deep(80) + "}"}) {
    const std::string answer =
        R"(<tool_call>{"name": "f", "arguments": {"a": )" + value + "}}</tool_call>";
    EXPECT_EQ(Read(Hermes(), answer), answer);
  }
}

TEST(ToolCalls, OfSeveralTheFirstWhereOneIsWanted) {
  const std::string call = "{\"name\": \"f\", \"parameters\": {\"n\": ";
  EXPECT_EQ(Read(Llama(), call + "1}}; " + call + "2}}", /*parallel=*/false), "|f({\"n\": 1})");
}

// Text goes out as soon as no call can begin in it.
TEST(ToolCalls, TextIsNotHeldBack) {
  ToolCallReader reader(Hermes(), true);
  EXPECT_EQ(reader.Push("Hello,").content, "Hello,");
  EXPECT_EQ(reader.Push(" you <tool").content, " you");
  EXPECT_EQ(reader.Push("box>").content, " <toolbox>");
  ToolCallReader llama(Llama(), true);
  EXPECT_EQ(llama.Push("A {").content, "A {");
}

}  // namespace
}  // namespace treadle
