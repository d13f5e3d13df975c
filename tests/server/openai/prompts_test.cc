// Where prompts begin and end, by the fields of vLLM's API: what the template writes last, what the
// answer goes on with, and what is cut off.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "server/openai/openai_errors.h"
#include "server/openai/openai_request.h"
#include "server/session/generation.h"
#include "tests/server/openai/chat_model.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using testing::HasSubstr;

ServedModel Model(const std::string& chat_template) {
  ServedModel model = ChatModel(chat_template.c_str());
  model.hidden = 4;
  model.max_context = 64;
  model.kv_pages = 64;
  return model;
}
// ChatML, as Qwen's and SmolLM's.
const ServedModel& Chat() {
  static const auto* const model = new ServedModel(
      Model("{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"));
  return *model;
}

std::string Said(const std::string& more, const std::string& last = "I am ") {
  return R"({"messages": [{"role": "user", "content": "I am "}, {"role": "assistant", "content": ")" +
         last + R"("}])" + more + "}";
}

TEST(Prompts, EndAsTheClientAsks) {
  EXPECT_EQ(ValidPrompt(Chat(), Said("")), "<user>I am <end>\n<assistant>I am <end>\n<assistant>");
  EXPECT_EQ(ValidPrompt(Chat(), Said(R"(, "add_generation_prompt": false)")),
            "<user>I am <end>\n<assistant>I am <end>\n");
  for (const char* more : {R"(, "continue_final_message": true)",
                           R"(, "continue_final_message": true, "add_generation_prompt": false)"}) {
    EXPECT_EQ(ValidPrompt(Chat(), Said(more)), "<user>I am <end>\n<assistant>I am ");
  }
  // Templates that trim what is said.
  EXPECT_EQ(ValidPrompt(Model("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"),
                        Said(R"(, "continue_final_message": true)", R"(\n I\n am\n)")),
            "[I am][I\n am");
  EXPECT_THAT(ValidPrompt(Chat(), Said(R"(, "continue_final_message": true)", "  ")),
              HasSubstr("expected a last message whose text the template shows as it is"));
  EXPECT_THAT(
      ValidPrompt(Chat(),
                  Said(R"(, "continue_final_message": true, "add_generation_prompt": true)")),
      HasSubstr("expected add_generation_prompt to be false"));
}

// A thought goes on, or is over.
TEST(Prompts, AnAnswerThatGoesOnMayBeWithinAThought) {
  const ServedModel model =
      Model("{% for m in messages %}{{ m.content }}{% endfor %}{# <think> </think> #}");
  for (const auto& [last, thinking] :
       {std::pair("<think>a", Thinking::kBegun), std::pair("<think>a</think>b", Thinking::kOver),
        std::pair("b", Thinking::kOver)}) {
    ASSERT_OK_AND_ASSIGN(
        const auto read,
        ReadOpenAiRequest(Said(R"(, "continue_final_message": true)", last), true, model));
    EXPECT_EQ(read.reading.thinking, thinking) << last;
  }
}

TEST(Prompts, AreCutAtTheirBeginning) {
  const auto cut = [](const std::string& value) {
    return ValidPrompt(
        Chat(),
        R"({"add_special_tokens": false, "prompt": "abcdef", "truncate_prompt_tokens": )" + value +
            "}",
        /*chat=*/false);
  };
  EXPECT_EQ(cut("2"), "ef");
  EXPECT_EQ(cut("6"), "abcdef");
  EXPECT_EQ(cut("63"), "abcdef");
  EXPECT_EQ(cut("-1"), "abcdef");
  for (const char* wrong : {"0", "-2", "64"}) {
    EXPECT_EQ(cut(wrong), Str("truncate_prompt_tokens is ", wrong,
                              ", expected 1 to 63, or -1 for what the context has room for"));
  }
  EXPECT_EQ(
      ValidPrompt(Chat(),
                  Str(R"({"truncate_prompt_tokens": -1, "prompt": ")", std::string(70, 'x'), "\"}"),
                  false),
      std::string(63, 'x'));
  EXPECT_EQ(ValidPrompt(Chat(), Said(R"(, "truncate_prompt_tokens": 12)")), "\n<assistant>");
}

TEST(Prompts, OfChatsCanBeTokenized) {
  const auto text = [](const std::string& body) {
    const auto read = ReadTokenize(body, Chat());
    return read.ok() ? read->text + (read->add_special ? "+" : "")
                     : std::string(read.status().message());
  };
  EXPECT_EQ(text(R"({"prompt": "a"})"), "a+");
  EXPECT_EQ(text(Said("")), "<user>I am <end>\n<assistant>I am <end>\n<assistant>");
  EXPECT_EQ(text(Said(R"(, "continue_final_message": true, "add_special_tokens": true)")),
            "<user>I am <end>\n<assistant>I am +");
  EXPECT_THAT(text(Said(R"(, "tools": [{"type": "function", "function": {"name": "f"}}])")),
              testing::StartsWith("<system># Tools"));
  EXPECT_THAT(text(Said(R"(, "temperature": 1)")), HasSubstr("temperature is not supported"));
  EXPECT_THAT(text(R"({"prompt": "a", "tools": []})"), HasSubstr("tools is not supported"));
}

TEST(Prompts, AStopStringMayBeTheAnswersEnd) {
  ASSERT_OK_AND_ASSIGN(
      const auto read,
      ReadOpenAiRequest(R"({"prompt": "a", "stop": "yz", "include_stop_str_in_output": true})",
                        false, Chat()));
  ASSERT_OK_AND_ASSIGN(const auto valid, ValidateRequest(read.For(0), Chat(), {}, 1));
  Generation generation(Chat().tokenizer.get(), valid.spec, valid.stop_strings, valid.generation);
  std::string told;
  for (const char c : std::string("xyz")) {
    for (const OutputPart& part : generation.Absorb({{.token = c}})) {
      told += part.text;
      EXPECT_EQ(part.finish == FinishReason::kStopString, c == 'z');
    }
  }
  EXPECT_EQ(told, "xyz");
}

TEST(Prompts, EmbeddingsMayBeShorter) {
  const auto valid = [](const std::string& more) -> absl::StatusOr<ValidatedRequest> {
    TREADLE_ASSIGN_OR_RETURN(const OpenAiRequest read,
                             ReadEmbeddings(R"({"input": "abc")" + more + "}", Chat()));
    return ValidateRequest(read.For(0), Chat(), {.pooling = Pooling::kMean}, 1);
  };
  ASSERT_OK_AND_ASSIGN(const auto two,
                       valid(R"(, "dimensions": 2, "user": "u", "priority": 0, "metadata": {})"));
  Generation generation(Chat().tokenizer.get(), two.spec, {}, two.generation);
  StreamToken token{.token = -1, .finish = FinishReason::kPooled};
  token.embedding = {3, 4, 100, 100};
  EXPECT_THAT(generation.Absorb({token})[0].embedding, testing::ElementsAre(0.6f, 0.8f));
  EXPECT_EQ(valid(R"(, "dimensions": 5)").status().message(), "dimensions is 5, expected 1 to 4");
  EXPECT_EQ(valid(R"(, "dimensions": 0)").status().message(),
            "dimensions is 0, expected 1 or more");
  ASSERT_OK_AND_ASSIGN(const auto cut, valid(R"(, "truncate_prompt_tokens": 2)"));
  EXPECT_THAT(cut.spec.prompt, testing::ElementsAre('b', 'c'));
}

}  // namespace
}  // namespace treadle
