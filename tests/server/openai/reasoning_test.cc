// Models' thoughts come apart from their answers, however answers arrive, and in OpenAI's JSON.
// Formats: chat templates and model cards of Qwen 3, DeepSeek R1 and Magistral, vLLM's pages of its
// parsers for Gemma 4, and for gpt-oss github.com/openai/harmony/blob/main/docs/format.md.
#include "server/openai/tools/reasoning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "base/status.h"
#include "server/constraint/constraint_compiler.h"
#include "server/openai/openai_answer.h"
#include "server/openai/openai_errors.h"
#include "server/openai/openai_request.h"
#include "tests/server/byte_tokenizer.h"
#include "tests/server/openai/chat_model.h"
#include "tests/server/openai/cut_answers.h"
#include "tests/server/without_xgrammar.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

// The part of the models' templates that matters here.
const char kQwen[] =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content is string %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is "
    "defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}";
const char kOpened[] =
    "{{ messages[0].content }}<\xEF\xBD\x9C"
    "Assistant\xEF\xBD\x9C><think>\n{# </think> #}";
const char kStripped[] = "{{ messages[0].content.split('</think>')[-1] }}<Assistant>";
const char kMagistral[] = "[SYSTEM_PROMPT][THINK]Draft[/THINK][/SYSTEM_PROMPT]{{ messages }}";
const char kGemma[] = "{{ messages[0].content }}<|turn>model\n{# <|channel>thought #}";
const char kHarmony[] =
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{{ messages[0].content }}{# <|channel|>analysis to=functions.f #}<|start|>assistant";

const ReasoningFormat& FormatOf(const char* chat_template) {
  return *FindReasoningFormat(chat_template);
}
const ToolFormat* HarmonyCalls() { return FindToolFormat("<|channel|> functions."); }
const ToolFormat* Hermes() { return FindToolFormat(R"(<tool_call>{"name": "f"}</tool_call>)"); }

// As one text, with a token for each piece.
std::string Read(const AnswerReader::Options& options, const std::string& answer) {
  return ReadHoweverCut(answer, [&](const auto& pieces) {
    AnswerReader reader(options);
    AnswerText all;
    for (const std::string_view piece : pieces) {
      reader.BeginToken();
      Add(reader.Push(piece), all);
    }
    Add(reader.Finish(), all);
    return Shown(all);
  });
}

TEST(Reasoning, TheTemplateAndThePromptShowTheFormat) {
  const auto after = [](const char* source, const std::string& prompt) {
    return ThinkingAfter(prompt, FormatOf(source), source);
  };
  EXPECT_EQ(FindReasoningFormat("{{ messages }}"), nullptr);
  EXPECT_EQ(after(kQwen, "<|im_start|>assistant\n"), Thinking::kMaybe);
  EXPECT_EQ(after(kQwen, "assistant\n<think>\n\n</think>\n\n"), Thinking::kOver);
  EXPECT_EQ(after(kOpened, "<Assistant><think>\n"), Thinking::kBegun);
  EXPECT_EQ(after(kStripped, "<Assistant>"), Thinking::kBegun);
  EXPECT_EQ(after(kStripped, "<Assistant></think>"), Thinking::kOver);
  EXPECT_EQ(after(kMagistral, "[/INST]"), Thinking::kMaybe);
  EXPECT_EQ(after(kGemma, "<|turn>model\n"), Thinking::kMaybe);
  EXPECT_EQ(after(kGemma, "<|turn>model\n<|channel>thought\n"), Thinking::kBegun);
  EXPECT_EQ(after(kGemma, "<|turn>model\n<|channel>thought\n<channel|>"), Thinking::kOver);
  EXPECT_TRUE(FormatOf(kHarmony).harmony());
}

TEST(Reasoning, MarksStandAroundIt) {
  const AnswerReader::Options maybe{.reasoning = &FormatOf(kQwen)};
  EXPECT_EQ(Read(maybe, "<think>\nTwo, \n and two.\n</think>\n\nFour. \n"),
            "Two, \n and two.|Four. \n");
  EXPECT_EQ(Read(maybe, "<think>\n\n</think>\n\nFour."), "|Four.");
  EXPECT_EQ(Read(maybe, "\n Four: <think>x</think>"), "|\n Four: <think>x</think>");
  EXPECT_EQ(Read(maybe, "<thin"), "|<thin");
  EXPECT_EQ(Read(maybe, ""), "|");
  EXPECT_EQ(Read(maybe, "<think>It was cut </thi"), "It was cut </thi|");
  EXPECT_EQ(Read(maybe, "<think>It was cut \n"), "It was cut|");
  EXPECT_EQ(Read(maybe, "<think>a</think>b</think>c"), "a|b</think>c");

  const AnswerReader::Options begun{.reasoning = &FormatOf(kOpened), .thinking = Thinking::kBegun};
  EXPECT_EQ(Read(begun, "Two < three.</think>Four."), "Two < three.|Four.");
  EXPECT_EQ(Read(begun, "\n<think>\nTwo.\n</think>\nFour."), "Two.|Four.");
  EXPECT_EQ(Read(begun, "<thought</think>"), "<thought|");

  const AnswerReader::Options over{.reasoning = &FormatOf(kQwen), .thinking = Thinking::kOver};
  EXPECT_EQ(Read(over, " <think>a</think>"), "| <think>a</think>");

  EXPECT_EQ(Read({.reasoning = &FormatOf(kMagistral)}, "[THINK]Two.[/THINK]Four."), "Two.|Four.");
  const AnswerReader::Options gemma{.reasoning = &FormatOf(kGemma)};
  EXPECT_EQ(Read(gemma, "<|channel>thought\nTwo.<channel|>Four."), "Two.|Four.");
  EXPECT_EQ(Read(gemma, "<|channel>though<channel|>Four."), "though|Four.");
}

TEST(Reasoning, CallsAreLookedForInWhatIsSaid) {
  const AnswerReader::Options options{.reasoning = &FormatOf(kQwen), .tools = Hermes()};
  const std::string call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
  EXPECT_EQ(Read(options, "<think>I write " + call + "?</think>\n\n" + call),
            "I write " + call + "?||f({})");
  EXPECT_EQ(Read(options, "<think>a</think>\n<tool_call>\n{\"name\": \"f\", \"argu"),
            "a|<tool_call>\n{\"name\": \"f\", \"argu");
}

TEST(Reasoning, HarmonyHasChannels) {
  const AnswerReader::Options plain{.reasoning = &FormatOf(kHarmony)};
  const AnswerReader::Options tools{.reasoning = &FormatOf(kHarmony), .tools = HarmonyCalls()};
  const std::string thought =
      "<|channel|>analysis<|message|>User asks: \"What is 2 + 2?\" Simple arithmetic. Provide "
      "answer.<|end|>\n<|start|>assistant";
  const std::string told = "User asks: \"What is 2 + 2?\" Simple arithmetic. Provide answer.";
  const std::string final = "<|channel|>final<|message|>2 + 2 = 4.";
  for (const auto& options : {plain, tools}) {
    EXPECT_EQ(Read(options, thought + final), told + "|2 + 2 = 4.");
    EXPECT_EQ(Read(options, thought + final + "<|return|>"), told + "|2 + 2 = 4.");
    EXPECT_EQ(Read(options, thought + thought + final), told + "\n" + told + "|2 + 2 = 4.");
    EXPECT_EQ(Read(options, "{\"sum\": 4}"), "|{\"sum\": 4}");  // held to a form
    EXPECT_EQ(Read(options, "<|channel|>analysis<|message|>Cut <|en"), "Cut <|en|");
    EXPECT_EQ(Read(options, "<|channel|>ana"), "|");
  }
  const std::string arguments = "{\"location\":\"San Francisco\"}";
  const std::string call =
      "<|channel|>commentary to=functions.get_current_weather "
      "<|constrain|>json<|message|>" +
      arguments;
  const std::string called = "|get_current_weather(" + arguments + ")";
  EXPECT_EQ(Read(tools, thought + call), told + "|" + called);
  EXPECT_EQ(Read(tools, thought + call + "<|call|>"), told + "|" + called);
  EXPECT_EQ(Read(tools, " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"),
            "||f({})");
  EXPECT_EQ(Read(tools, "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + call +
                            "<|call|><|start|>assistant" + call),
            "|I look." + called + called);
  EXPECT_EQ(Read({.reasoning = &FormatOf(kHarmony), .tools = HarmonyCalls(), .parallel = false},
                 call + "<|call|><|start|>assistant" + call),
            "|" + called);
  const std::string cut = call.substr(0, call.size() - 3);
  EXPECT_EQ(Read(tools, thought + cut), told + "|" + cut);
  EXPECT_EQ(Read(plain, call), "|" + arguments);  // nobody has offered any
}

TEST(Reasoning, AnyTextIsTheSameHoweverItArrives) {
  const std::vector<std::string> marks = {
      "<think>",     "</think>",    "[THINK]",
      "[/THINK]",    "<|channel>",  "thought\n",
      "<channel|>",  "<|start|>",   "assistant",
      "<|channel|>", "analysis",    "commentary",
      "final",       "<|message|>", " to=functions.f",
      "<|end|>",     "<|call|>",    "{\"a\": 1}",
      "{",           "<tool_call>", "\n",
      " ",           "a",           "{\"name\": \"f\", \"arguments\": {}}",
      "</tool_call>"};
  std::minstd_rand random(3);
  for (int i = 0; i < 300; ++i) {
    std::string answer;
    for (size_t n = random() % 9; n > 0; --n) answer += marks[random() % marks.size()];
    for (const char* source : {kQwen, kGemma, kMagistral, kHarmony}) {
      const bool calls = random() % 2 == 0;
      Read({.reasoning = &FormatOf(source),
            .thinking = static_cast<Thinking>(random() % 3),
            .tools = !calls               ? nullptr
                     : source == kHarmony ? HarmonyCalls()
                                          : Hermes()},
           answer);
    }
  }
}

// A token counts where it begins; marks do not.
TEST(Reasoning, TokensAreCounted) {
  const auto count = [](const AnswerReader::Options& options,
                        const std::vector<std::string>& tokens) {
    AnswerReader reader(options);
    for (const std::string& token : tokens) {
      reader.BeginToken();
      reader.Push(token);
    }
    reader.Finish();
    return reader.reasoning_tokens();
  };
  const AnswerReader::Options qwen{.reasoning = &FormatOf(kQwen)};
  EXPECT_EQ(count(qwen, {"<think>", "\n", "Two", " and", "", " two", "</think>", "\n\n", "4"}), 4);
  EXPECT_EQ(count(qwen, {"<th", "ink>", "Two", "</", "think", ">4", ""}), 1);
  EXPECT_EQ(count(qwen, {"4", " <think>", "a"}), 0);
  EXPECT_EQ(count(qwen, {"<think>", "a", "b"}), 2);
  EXPECT_EQ(count({.reasoning = &FormatOf(kHarmony)},
                  {"<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "<|start|>",
                   "assistant", "<|channel|>", "final", "<|message|>", "c"}),
            2);
}

// -- requests and answers -------------------------------------------------------------------------

ServedModel ModelWith(const char* chat_template) {
  ServedModel model = ChatModel(chat_template);
  model.constraints = ConstraintCompiler::Create(*model.tokenizer, 258, model.end_ids);
  return model;
}

std::string Body(const std::string& more = "") {
  return R"({"messages": [{"role": "user", "content": "Hi"}])" + more + "}";
}

TEST(Reasoning, TheTemplateIsToldWhatTheClientAsks) {
  const ServedModel qwen = ModelWith(kQwen), harmony = ModelWith(kHarmony);
  const std::string thinks = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
  const std::string does_not = thinks + "<think>\n\n</think>\n\n";
  for (const char* more : {"", R"(, "reasoning_effort": "high")", R"(, "reasoning_effort": null)",
                           R"(, "chat_template_kwargs": {"enable_thinking": true})"}) {
    EXPECT_EQ(ValidPrompt(qwen, Body(more)), thinks) << more;
  }
  for (const char* more : {R"(, "reasoning_effort": "none")",
                           R"(, "chat_template_kwargs": {"enable_thinking": false})",
                           R"(, "reasoning_effort": "high", "chat_template_kwargs":
                               {"enable_thinking": false, "other": [1, {"a": null}]})"}) {
    EXPECT_EQ(ValidPrompt(qwen, Body(more)), does_not) << more;
  }
  EXPECT_THAT(ValidPrompt(harmony, Body()), HasSubstr("Reasoning: medium"));
  EXPECT_THAT(ValidPrompt(harmony, Body(R"(, "reasoning_effort": "low")")),
              HasSubstr("Reasoning: low"));
  EXPECT_THAT(
      ValidPrompt(harmony, Body(R"(, "chat_template_kwargs": {"reasoning_effort": "high"})")),
      HasSubstr("Reasoning: high"));
  EXPECT_EQ(ValidPrompt(qwen, Body(R"(, "reasoning_effort": "most")")),
            R"(reasoning_effort is "most", expected "none", "minimal", "low", "medium", "high" or )"
            R"("xhigh")");
  EXPECT_THAT(ValidPrompt(qwen, Body(R"(, "chat_template_kwargs": {"messages": []})")),
              HasSubstr("chat_template_kwargs.messages is given, expected variables"));
  EXPECT_THAT(ValidPrompt(qwen, Body(R"(, "chat_template_kwargs": [])")),
              HasSubstr("chat_template_kwargs is [], expected an object"));
}

TEST(Reasoning, MessagesMayHaveWhatWasThought) {
  for (const char* name : {"reasoning_content", "reasoning"}) {
    EXPECT_EQ(ValidPrompt(ModelWith(kQwen),
                          Str(R"({"messages": [{"role": "assistant", "content": "4", ")", name,
                              R"(": "2 + 2"}]})")),
              "<|im_start|>assistant\n<think>\n2 + 2\n</think>\n\n4<|im_end|>\n"
              "<|im_start|>assistant\n");
  }
}

class Told {
 public:
  Told(const ServedModel& model, const std::string& more)
      : request_(*ReadOpenAiRequest(Body(more), true, model)), answer_(model, request_, "id", 5) {}
  // A token for each text.
  OpenAiAnswer& Output(const std::vector<std::string>& tokens, FinishReason finish) {
    OutputPart part{.finish = finish};
    for (const std::string& token : tokens) {
      part.text += token;
      part.token_ids.push_back(1);
      part.ends.push_back(part.text.size());
    }
    SessionEvent event;
    event.output = &part;
    wants_end_ = answer_.Add(0, event);
    return answer_;
  }
  bool wants_end() const { return wants_end_; }

 private:
  const OpenAiRequest request_;
  OpenAiAnswer answer_;
  bool wants_end_ = false;
};

TEST(Reasoning, AWholeAnswerHasItApart) {
  const ServedModel model = ModelWith(kQwen);
  const std::vector<std::string> tokens = {"<think>", "\n", "2+2", "\n", "</think>", "\n\n", "4"};
  Told told(model, "");
  Json answer = Json::parse(told.Output(tokens, FinishReason::kEndToken).Whole());
  EXPECT_EQ(answer["choices"][0]["message"], Json::parse(R"({"role": "assistant", "content": "4",
      "reasoning_content": "2+2", "reasoning": "2+2", "refusal": null})"));
  EXPECT_EQ(answer["usage"]["completion_tokens"], 7);
  EXPECT_EQ(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 1);

  Told without(model, R"(, "include_reasoning": false)");
  answer = Json::parse(without.Output(tokens, FinishReason::kEndToken).Whole());
  EXPECT_EQ(answer["choices"][0]["message"].count("reasoning"), 0u);
  EXPECT_EQ(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 1);

  Told cut(model, "");
  answer = Json::parse(cut.Output({"<think>", "a"}, FinishReason::kLength).Whole());
  EXPECT_EQ(answer["choices"][0]["message"]["content"], Json());
  EXPECT_EQ(answer["choices"][0]["message"]["reasoning"], "a");
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "length");
}

TEST(Reasoning, AStreamHasItApart) {
  Told told(ModelWith(kQwen), R"(, "stream": true)");
  const auto chunk = [&](const std::string& delta, const std::string& finish = "null") {
    return R"(data: {"id":"id","object":"chat.completion.chunk","created":5,"model":"m",)"
           R"("system_fingerprint":"fp_1","choices":[{"index":0,"delta":)" +
           delta + R"(,"logprobs":null,"finish_reason":)" + finish + "}]}\n\n";
  };
  const FinishReason none = FinishReason::kNone;
  EXPECT_EQ(told.Output({"<think>", "\n"}, none).TakeEvents(),
            chunk(R"({"role":"assistant","content":""})"));
  EXPECT_EQ(told.Output({"2+", "2 "}, none).TakeEvents(),
            chunk(R"({"reasoning_content":"2+2","reasoning":"2+2"})"));
  EXPECT_EQ(told.Output({"= 4", "</think>", "\n\n", "4"}, none).TakeEvents(),
            chunk(R"({"reasoning_content":" = 4","reasoning":" = 4","content":"4"})"));
  EXPECT_EQ(told.Output({}, FinishReason::kLength).TakeEvents(),
            chunk("{}", R"("length","stop_reason":null)"));
}

// The part that has the call has more tokens; how many depends on how busy the machine is.
TEST(Reasoning, WhereOneCallIsWantedTheAnswerEndsWithIt) {
  const ServedModel model = ModelWith(kHarmony);
  for (const std::vector<std::string>& behind :
       {std::vector<std::string>{}, {"<|start|>"}, {"<|start|>", "assistant"}}) {
    Told told(model, R"(, "parallel_tool_calls": false, "tools": [{"type": "function",
                         "function": {"name": "f"}}])");
    std::vector<std::string> tokens = {" to=functions.f", "<|message|>", "{}", "<|call|>"};
    tokens.insert(tokens.end(), behind.begin(), behind.end());
    told.Output(tokens, FinishReason::kNone);
    EXPECT_TRUE(told.wants_end());
    const Json answer = Json::parse(told.Output({"more"}, FinishReason::kStopString).Whole());
    EXPECT_FALSE(told.wants_end());
    EXPECT_EQ(answer["usage"]["completion_tokens"], 4);
    EXPECT_EQ(answer["choices"][0]["finish_reason"], "tool_calls");
    EXPECT_EQ(answer["choices"][0]["stop_reason"], Json());
    EXPECT_EQ(answer["choices"][0]["message"]["tool_calls"].size(), 1u);
    EXPECT_EQ(answer["choices"][0]["message"]["content"], Json());
  }
}

// A form holds what is said; what is thought is free.
TEST(Reasoning, AFormHoldsWhatIsSaid) {
  const std::string form =
      R"(, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema":
          {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"],
           "additionalProperties": false}}})";
  const auto allows = [&](const char* source, const std::string& answer) {
    const ServedModel model = ModelWith(source);
    const auto read = ReadOpenAiRequest(Body(form), true, model);
    EXPECT_EQ(read.status(), absl::OkStatus());
    const auto valid = ValidateRequest(read->For(0), model, {}, 1);
    EXPECT_EQ(valid.status(), absl::OkStatus());
    const auto state = valid->spec.constraint->Begin();
    const auto accepts = [&](char c) { return state->Accept(static_cast<unsigned char>(c)).ok(); };
    return std::ranges::all_of(answer, accepts) && state->Accept(ByteTokenizer::kEnd).ok();
  };
  const ServedModel qwen = ModelWith(kQwen);
  const auto works = qwen.constraints->Compile({.kind = Constraint::Kind::kJsonObject});
  if (IsWithoutXGrammar(works.status().ToString())) GTEST_SKIP() << kWithoutXGrammar;
  EXPECT_TRUE(allows(kQwen, "<think>\nTwo < {three}\n</think>\n\n{\"sum\": 4}"));
  EXPECT_TRUE(allows(kQwen, "{\"sum\": 4}"));
  EXPECT_FALSE(allows(kQwen, "<think>Two</think>Four"));
  EXPECT_FALSE(allows(kQwen, "Four"));
  EXPECT_TRUE(allows(kOpened, "Two</think>{\"sum\": 4}"));
  EXPECT_FALSE(allows(kOpened, "{\"sum\": 4}"));
  EXPECT_TRUE(allows(kHarmony, "{\"sum\": 4}"));
  EXPECT_THAT(ValidPrompt(ModelWith(kHarmony), Body(form)),
              testing::EndsWith("<|start|>assistant<|channel|>final<|message|>"));
}

}  // namespace
}  // namespace treadle
