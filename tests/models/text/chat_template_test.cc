#include "models/text/jinja/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<ChatMessage> kChat = {{"user", "hi"}};

// The text, or the error's message.
std::string Render(const std::string& source, const std::vector<ChatMessage>& messages = kChat,
                   const ChatOptions& options = {}) {
  const auto parsed = ChatTemplate::Parse(source);
  if (!parsed.ok()) return std::string(parsed.status().message());
  const auto text = parsed->Render(messages, options);
  return text.ok() ? *text : std::string(text.status().message());
}

std::string ParseError(const std::string& source) {
  const auto parsed = ChatTemplate::Parse(source);
  return parsed.ok() ? "" : std::string(parsed.status().message());
}

// tests/oracles/make_template_oracles.py made the file; tests/clients/templates_client.py makes
// others.
TEST(ChatTemplateTest, RendersWhatTransformersRenders) {
  const char* other = std::getenv("TREADLE_CHAT_TEMPLATES");
  std::ifstream in(other != nullptr ? other : TREADLE_TESTDATA "/chat_templates.json");
  const auto oracle = nlohmann::json::parse(in, nullptr, false);
  ASSERT_GE(oracle["templates"].size(), 30u);
  for (const auto& entry : oracle["templates"]) {
    const auto parsed = ChatTemplate::Parse(entry["template"].get<std::string>());
    EXPECT_TRUE(parsed.ok()) << entry["name"] << ": " << parsed.status();
    if (!parsed.ok()) continue;
    for (const auto& row : entry["cases"]) {
      SCOPED_TRACE(entry["name"].get<std::string>() + " " + row["messages"].dump());
      std::vector<ChatMessage> messages;
      for (const auto& message : row["messages"]) {
        ChatMessage& read = messages.emplace_back();
        read.role = message["role"];
        if (message["content"].is_string()) read.content = message["content"];
        read.tool_call_id = message.value("tool_call_id", "");
        read.name = message.value("name", "");
        if (!message.contains("tool_calls")) continue;
        for (const auto& call : message["tool_calls"]) {
          read.tool_calls.push_back({call["id"], call["function"]["name"], call["arguments"]});
        }
      }
      ChatOptions options;
      options.tools = row.value("tools", "");
      options.add_generation_prompt = row["add_generation_prompt"];
      options.bos_token = row["bos_token"];
      options.eos_token = row["eos_token"];
      options.variables = {{"now", oracle["now"]}};
      const auto text = parsed->Render(messages, options);
      if (row["expected"].is_null()) {
        EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument) << text.value_or("");
      } else {
        EXPECT_TRUE(text.ok()) << text.status();
        EXPECT_EQ(text.value_or(""), row["expected"].get<std::string>());
      }
    }
  }
}

// Nothing beside calls is none to a template that asks for it, and "" to one that would fail; what
// is there stays.
TEST(ChatTemplateTest, NoContentIsNoneWhereThatCanBeRendered) {
  const std::vector<ChatMessage> none = {{"assistant", std::nullopt, {{"1", "f", "{}"}}}};
  const std::vector<ChatMessage> empty = {{"assistant", "", {{"1", "f", "{}"}}}};
  const std::string asks = "{{ 'none' if messages[0].content is none else 'text' }}";
  EXPECT_EQ(Render(asks, none), "none");
  EXPECT_EQ(Render(asks, empty), "text");
  for (const char* fails : {"{{ '</think>' in messages[0].content }}",
                            "{{ messages[0].content.split('x')[-1] == 'x' }}"}) {
    EXPECT_EQ(Render(fails, none), "False");
    EXPECT_EQ(Render(fails, empty), "False");
  }
  EXPECT_THAT(Render("{{ messages[0].content + 1 }}", none), HasSubstr("'NoneType' and 'int'"));
}

TEST(ChatTemplateTest, TellsTheLineOfWhatItDoesNotKnow) {
  EXPECT_EQ(ParseError("a\n\n{{ x | sparkle }}"),
            "chat template, line 3: there is no filter 'sparkle'");
  EXPECT_EQ(ParseError("\n{% if x is shiny %}{% endif %}"),
            "chat template, line 2: there is no test 'shiny'");
  EXPECT_EQ(ParseError("\n{% include 'x' %}"),
            "chat template, line 2: there is no tag 'include' here");
  EXPECT_EQ(ParseError("\n\n{% endfor %}"), "chat template, line 3: there is no tag 'endfor' here");
  EXPECT_THAT(ParseError("x\n{% for a in b %}\n\n"),
              AllOf(HasSubstr("line 2"), HasSubstr("'endfor' is missing")));
  EXPECT_THAT(ParseError("\n{{ x "), AllOf(HasSubstr("line 2"), HasSubstr("not closed")));
  EXPECT_THAT(ParseError("{{ 'x }}"), HasSubstr("the string is not closed"));
  EXPECT_THAT(ParseError("{{ x ? y }}"), HasSubstr("unexpected character '?'"));
  EXPECT_THAT(ParseError("{{ x y }}"), HasSubstr("expected '}}', found 'y'"));
  EXPECT_THAT(ParseError("{{ (1 }}"), HasSubstr("unexpected '}'"));
  EXPECT_THAT(ParseError("{% break %}"), HasSubstr("outside a loop"));
  EXPECT_THAT(ParseError("{{ 99999999999999999999 }}"), HasSubstr("out of range"));
  EXPECT_THAT(ParseError("{{ '\xFF' }}"), HasSubstr("not valid UTF-8 at byte 4"));
}

TEST(ChatTemplateTest, TellsTheLineOfWhatGoesWrong) {
  EXPECT_EQ(Render("\n{{ raise_exception('only ' ~ 1) }}"),
            "chat template, line 2: the template raised: only 1");
  EXPECT_EQ(Render("\n\n{{ nothing.at.all }}"), "chat template, line 3: 'nothing' is undefined");
  EXPECT_EQ(Render("{{ nothing() }}"), "chat template, line 1: 'nothing' is undefined");
  EXPECT_THAT(Render("{{ 'a'.explode() }}"), HasSubstr("'str' has no method 'explode'"));
  EXPECT_THAT(Render("{{ messages.append(1) }}"), HasSubstr("'list' has no method 'append'"));
  EXPECT_THAT(Render("{% if true %}\n{{ 1 | sparkle }}{% endif %}"),
              HasSubstr("line 2: there is no filter 'sparkle'"));
  EXPECT_EQ(Render("{% if false %}{{ 1 | sparkle }}{% endif %}ok"), "ok");
  EXPECT_THAT(Render("{{ 9223372036854775807 + 1 }}"), HasSubstr("out of range"));
  EXPECT_THAT(Render("{{ -9223372036854775807 - 2 }}"), HasSubstr("out of range"));
  EXPECT_THAT(Render("{{ '99999999999999999999' | int }}"),
              HasSubstr("int: 99999999999999999999 is out of range"));
  EXPECT_THAT(Render("{{ 1e20 | int }}"), HasSubstr("int: 1e+20 is out of range"));
  EXPECT_THAT(Render("{{ {[]: 1} }}"),
              HasSubstr("a key is of type 'list', expected a text, number or none"));
}

TEST(ChatTemplateTest, WritesStringsAsPythonsJsonDoes) {
  const std::vector<ChatMessage> chat = {{"user", "\x01\b\t\"\\/\x7F\xC2\x80\xF0\x9F\x98\x80"}};
  EXPECT_EQ(Render("{{ messages[0].content | tojson }}", chat),
            "\"\\u0001\\b\\t\\\"\\\\/\x7F\xC2\x80\xF0\x9F\x98\x80\"");
  EXPECT_EQ(Render("{{ messages[0].content | tojson(ensure_ascii=true) }}", chat),
            R"("\u0001\b\t\"\\/\u007f\u0080\ud83d\ude00")");
}

TEST(ChatTemplateTest, RefusesInvalidTextInMessages) {
  EXPECT_EQ(Render("{{ 1 }}", {{"user", "ok"}, {"user", "a\xFF"}}),
            "messages[1].content is not valid UTF-8 at byte 1");
  EXPECT_THAT(Render("{{ 1 }}", {{"\xC3", ""}}), HasSubstr("messages[0].role"));
}

TEST(ChatTemplateTest, VariablesReachTheTemplate) {
  ChatOptions options;
  options.variables = {{"date_string", "today"}, {"now", "2024-02-29"}};
  EXPECT_EQ(Render("{{ date_string }} {{ strftime_now('%d %b %Y') }}", kChat, options),
            "today 29 Feb 2024");
  options.variables = {{"now", "yesterday"}};
  EXPECT_THAT(Render("{{ strftime_now('%d') }}", kChat, options), HasSubstr("'yesterday'"));
}

// Each of these would run, grow or nest without end.
TEST(ChatTemplateTest, HostileTemplatesEndInAnError) {
  const std::string loops =
      "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
  EXPECT_THAT(Render(loops), HasSubstr("steps"));
  EXPECT_THAT(Render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), HasSubstr("levels"));
  EXPECT_THAT(Render("{{ 'abcdefgh' * 99999999999 }}"), HasSubstr("bytes"));
  EXPECT_THAT(Render("{{ range(999999999) }}"), HasSubstr("range"));
  const std::string doubling = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}";
  EXPECT_THAT(Render(doubling + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}"), HasSubstr("bytes"));
  EXPECT_THAT(Render(doubling + "{% set ns.x = ns.x.replace('', ns.x) %}{% endfor %}"),
              HasSubstr("bytes"));
  EXPECT_THAT(Render(doubling + "{% set ns.x = [ns.x] %}{% endfor %}"), HasSubstr("deeply"));
  EXPECT_THAT(Render(doubling + "{% set ns.x = [ns.x, ns.x] %}{% if loop.index > 50 %}"
                                "{{ ns.x == ns.x }}{% endif %}{% endfor %}"),
              HasSubstr("steps"));
  EXPECT_THAT(Render(doubling + "{% set ns.x = [ns.x, ns.x] %}{% if loop.index > 50 %}"
                                "{{ ns.x | tojson }}{% endif %}{% endfor %}"),
              ::testing::AnyOf(HasSubstr("bytes"), HasSubstr("steps")));
  EXPECT_THAT(Render(doubling + "{% set ns.x = ns %}{% endfor %}"), HasSubstr("namespace"));
  for (const char* held : {"{'a': ns.x.get}", "joiner(ns.x)", "cycler(ns.x).next"}) {
    EXPECT_THAT(Render(std::string("{% set ns = namespace(x={}) %}{% for i in range(3000) %}{% set "
                                   "ns.x = ") +
                       held + " %}{% endfor %}"),
                HasSubstr("deeply"))
        << held;
  }
  EXPECT_THAT(Render(doubling + "{% set ns.x = [ns] %}{% endfor %}"), HasSubstr("namespace"));
  EXPECT_THAT(Render("{% set t = 'x' * 9999999 %}{% for i in range(99) %}{{ t }}{% endfor %}"),
              HasSubstr("bytes"));
  EXPECT_THAT(Render("{{ 2 ** 99999999999 }}"), HasSubstr("out of range"));
  EXPECT_THAT(Render("{{ 0 ** 99999999999 }}"), HasSubstr("steps"));
}

// Each one's cost is charged where it is spent: all of these end within a few milliseconds, where
// they once took seconds or gigabytes.
TEST(ChatTemplateTest, CostsAreChargedBeforeTheyAreSpent) {
  const auto limited = ::testing::AnyOf(HasSubstr("bytes"), HasSubstr("steps"));
  const std::string big = "{% set k = 'x' * 2000000 %}";
  const std::string often = "{% for i in range(1000) %}";
  EXPECT_THAT(Render(big + "{% set ns = namespace(a=[]) %}" + often +
                     "{% set ns.a = ns.a + [{}[k]] %}{% endfor %}"),
              limited);
  EXPECT_LT(Render(big + "{{ {}[k].x }}").size(), 300u);
  EXPECT_LT(Render(big + "{{ raise_exception(k) }}").size(), 700u);
  std::string list = "{% set l = [1] %}";
  for (int i = 0; i < 60; ++i) list += "{% set l = [l] %}";
  EXPECT_THAT(Render(list + often + "{% set s = l | tojson(indent=100) %}{% endfor %}"), limited);
  EXPECT_THAT(
      Render(big + "{% set c = 'y' * 200000 %}" + often + "{% set t = k.strip(c) %}{% endfor %}"),
      limited);
  EXPECT_THAT(Render(big + often + "{% if k == k ~ '' %}{% endif %}{% endfor %}"), limited);
  EXPECT_THAT(Render(big + "{% set a = k ~ 'a' %}{% set b = k ~ 'b' %}" + often +
                     "{% if a < b %}{% endif %}{% endfor %}"),
              limited);
  EXPECT_THAT(Render(big + often + "{% if 'xxxxy' in k %}{% endif %}{% endfor %}"), limited);
  EXPECT_THAT(Render(often + "{% set d = namespace({'a': 1, 'b': 2}) %}{% set e = 'x' * 9000 %}"
                             "{% set f = namespace({e: 1}) %}{% endfor %}"),
              limited);
}

// Searches that compare every place with nearly all of a long text.
TEST(ChatTemplateTest, SearchesAreLinear) {
  const std::vector<ChatMessage> chat = {{"user", std::string(400'000, 'a')},
                                         {"user", std::string(200'000, 'a') + "b"}};
  const std::string both = "{% set t = messages[0].content %}{% set p = messages[1].content %}";
  EXPECT_EQ(Render(both + "{{ t.find(p) }} {{ p in t }} {{ t.count(p) }} {{ t.split(p) | length }} "
                          "{{ t.rsplit(p) | length }} {{ t.replace(p, '') | length }}",
                   chat),
            "-1 False 0 1 1 400000");
  EXPECT_EQ(Render(both + "{{ t.strip(p) }}|{{ p.lstrip(t) }}", chat), "|b");
  EXPECT_EQ(Render("{{ 'aaa'.rsplit('aa') }} {{ 'a-b-c'.rsplit('-', 1) }} {{ '-a-'.rsplit('-') }}"),
            "['a', ''] ['a-b', 'c'] ['', 'a', '']");
}

TEST(ChatTemplateTest, ALiteralWithManyKeysIsLinear) {
  std::string source = "{% set d = {";
  for (int i = 0; i < 20'000; ++i) source += "'k" + std::to_string(i % 15'000) + "': 1, ";
  EXPECT_EQ(Render(source + "} %}{{ d | length }}"), "15000");
}

TEST(ChatTemplateTest, TheDeadlineEndsARendering) {
  ASSERT_OK_AND_ASSIGN(const auto parsed,
                       ChatTemplate::Parse("{% for i in range(30000) %}{% endfor %}"));
  ChatOptions options;
  options.deadline = std::chrono::steady_clock::now() - std::chrono::seconds(1);
  EXPECT_EQ(parsed.Render(kChat, options).status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(ChatTemplateTest, ATemplateThatCostsTooMuchIsFoundAtLoad) {
  const auto cost = [](const std::string& source) {
    return ChatTemplate::Parse(source)->CheckCost();
  };
  EXPECT_TRUE(cost("{% for m in messages %}{{ m.content }}{% endfor %}").ok());
  EXPECT_TRUE(cost("{{ raise_exception('only pictures') }}").ok());  // its own affair
  EXPECT_EQ(
      cost("{% for m in messages %}{% for i in range(9999) %}{% endfor %}{% endfor %}").code(),
      absl::StatusCode::kResourceExhausted);
}

// A long conversation, with a template that walks it backwards and forwards, is within the budget.
TEST(ChatTemplateTest, LongConversationsFit) {
  std::vector<ChatMessage> chat;
  for (int i = 0; i < 4000; ++i)
    chat.push_back({i % 2 ? "assistant" : "user", std::string(500, 'w')});
  const std::string source =
      "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' and not "
      "m.content.startswith('<tool>') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
      "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
      "{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>' + '\n' }}"
      "{% elif m.role == 'assistant' %}{% set content = m.content %}{% if '</think>' in m.content "
      "%}"
      "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
      "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}";
  EXPECT_GT(Render(source, chat).size(), size_t{4000} * 500);
}

TEST(ChatTemplateTest, DeepSourcesEndInAnError) {
  const auto repeat = [](const std::string& part, int times) {
    std::string text;
    for (int i = 0; i < times; ++i) text += part;
    return text;
  };
  constexpr int kMany = 50'000;
  EXPECT_THAT(ParseError("{{ " + repeat("(", kMany) + "1" + repeat(")", kMany) + " }}"),
              HasSubstr("nest"));
  EXPECT_THAT(ParseError("{{ " + repeat("[", kMany) + "1" + repeat("]", kMany) + " }}"),
              HasSubstr("nest"));
  EXPECT_THAT(ParseError("{{ " + repeat("not ", kMany) + "1 }}"), HasSubstr("nest"));
  EXPECT_THAT(ParseError("{{ " + repeat("- ", kMany) + "1 }}"), HasSubstr("nest"));
  EXPECT_THAT(ParseError("{{ 1" + repeat("+1", kMany) + " }}"), HasSubstr("nest"));
  EXPECT_THAT(ParseError("{{ x" + repeat(".x", kMany) + " }}"), HasSubstr("nest"));
  EXPECT_THAT(ParseError("{{ x" + repeat("|trim", kMany) + " }}"), HasSubstr("nest"));
  EXPECT_THAT(ParseError("{{ " + repeat("1 if 1 else ", kMany) + "1 }}"), HasSubstr("nest"));
  EXPECT_THAT(ParseError(repeat("{% if 1 %}", kMany)), HasSubstr("blocks are open"));
  EXPECT_THAT(ParseError(std::string(2 << 20, 'x')), HasSubstr("at most"));
}

// Any bytes, and any pieces of real templates in any order, give a text or an error.
TEST(ChatTemplateTest, NonsenseIsSafe) {
  constexpr const char* kPieces[] = {
      "{{",   "}}",       "{%",    "%}",     "{#",   "#}",      "-",          " if ", " for ", "x",
      " in ", "messages", "[0]",   ".role",  "|",    "trim",    "'",          "\"",   "(",     ")",
      "set ", "=",        "endif", "endfor", "else", "1",       "\n",         " ",    "~",     "+",
      "*",    ":",        ",",     "is ",    "not ", "defined", "macro f(x)", "loop", "\\"};
  uint32_t state = 1;
  for (int i = 0; i < 20'000; ++i) {
    std::string source = i % 2 ? "{{ " : "{% ";
    for (int j = 0; j < 12; ++j) {
      state = state * 1664525 + 1013904223;
      source += kPieces[(state >> 8) % std::size(kPieces)];
    }
    Render(source);
  }
}

}  // namespace
}  // namespace treadle
