// OpenAI's requests and errors, against literal texts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "base/retry_after.h"
#include "base/status.h"
#include "server/openai/openai_errors.h"
#include "server/session/sampling_defaults.h"
#include "tests/server/openai/letter_model.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(OpenAiRequest, EveryFieldOfACompletion) {
  const OpenAiRequest request = ReadGood(false, R"({
      "model": "m", "prompt": "ab", "max_tokens": 7, "min_tokens": 2, "n": 3, "seed": -1,
      "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 1,
      "frequency_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"7": -100, "9": 1.5},
      "stop": ["x", "yz"], "stop_token_ids": [3, 4], "ignore_eos": true, "logprobs": 2,
      "echo": true, "stream": true,
      "stream_options": {"include_usage": true, "continuous_usage_stats": false},
      "add_special_tokens": false, "return_token_ids": true, "skip_special_tokens": false, "user": "u", "metadata": {"a": "b"},
      "store": false, "service_tier": "auto", "suffix": null, "tools": null})");
  const GenerateRequest asked = request.For(0);
  EXPECT_EQ(std::get<std::string>(asked.prompt), "ab");
  EXPECT_EQ(asked.stopping.max_new_tokens, 7);
  EXPECT_EQ(asked.stopping.min_new_tokens, 2);
  EXPECT_EQ(asked.sampling.num_candidates, 3);
  EXPECT_EQ(asked.sampling.seed, UINT64_MAX);
  const SamplingParameters& sampling = asked.sampling.parameters;
  EXPECT_EQ(sampling.temperature, 0.5f);
  EXPECT_EQ(sampling.top_p, 0.9f);
  EXPECT_EQ(sampling.top_k, 40);
  EXPECT_EQ(sampling.min_p, 0.1f);
  EXPECT_EQ(sampling.presence_penalty, 1);
  EXPECT_EQ(sampling.frequency_penalty, -1);
  EXPECT_EQ(sampling.repetition_penalty, 1.5f);
  ASSERT_EQ(sampling.logit_bias.size(), 2u);
  EXPECT_EQ(sampling.logit_bias[1].token, 9);
  EXPECT_EQ(sampling.logit_bias[1].bias, 1.5f);
  EXPECT_THAT(asked.stopping.stop_strings, ElementsAre("x", "yz"));
  EXPECT_THAT(asked.stopping.stop_token_ids, ElementsAre(3, 4));
  EXPECT_TRUE(asked.stopping.ignore_eos);
  EXPECT_FALSE(asked.add_special_tokens);
  EXPECT_TRUE(asked.special_tokens);
  EXPECT_EQ(asked.logprobs, 2);
  EXPECT_EQ(asked.prompt_logprobs, 2);  // of the echo
  EXPECT_TRUE(request.echo && request.stream && request.include_usage && request.token_ids);
  EXPECT_FALSE(request.chat || request.prompt_only || request.prompt_logprobs);
}

TEST(OpenAiRequest, WhatIsAbsentOrNullHasItsDefault) {
  for (const char* body : {R"({"prompt": "a"})", R"({"prompt": "a", "model": null, "n": null,
      "temperature": null, "stop": null, "max_tokens": null, "logprobs": null, "top_k": -1})"}) {
    const OpenAiRequest request = ReadGood(false, body);
    const GenerateRequest asked = request.For(0), fresh;
    EXPECT_EQ(asked.sampling.parameters.temperature, fresh.sampling.parameters.temperature);
    EXPECT_EQ(asked.sampling.num_candidates, 1);
    EXPECT_FALSE(asked.sampling.parameters.top_k || asked.sampling.seed || asked.logprobs);
    EXPECT_FALSE(asked.stopping.max_new_tokens);
    EXPECT_FALSE(request.stream || request.echo);
  }
}

TEST(OpenAiRequest, WhatIsAbsentIsAsTheModelsAuthorsRecommend) {
  ServedModel model;
  model.sampling_defaults = {.temperature = 0.6f, .top_k = 20, .top_p = 0.95f};
  const auto sampling = [&](const std::string& more) {
    const auto read = ReadOpenAiRequest(R"({"prompt": "a")" + more + "}", false, model);
    EXPECT_TRUE(read.ok()) << read.status();
    return EffectsJson(read.ok() ? read->For(0).sampling.parameters : SamplingParameters());
  };
  EXPECT_EQ(sampling(""), R"({"temperature":0.6,"top_k":20,"top_p":0.95})");
  EXPECT_EQ(sampling(R"(, "temperature": null)"), sampling(""));
  EXPECT_EQ(sampling(R"(, "temperature": 0)"), R"({"temperature":0,"top_k":20,"top_p":0.95})");
  for (const char* const off : {"0", "-1"}) {
    EXPECT_EQ(sampling(Str(R"(, "top_p": 1, "top_k": )", off)), R"({"temperature":0.6})");
  }
}

TEST(OpenAiRequest, PromptsAreTextsOrIdsOrArraysOfThem) {
  const auto prompts = [](const std::string& prompt) {
    return ReadGood(false, R"({"prompt": )" + prompt + "}").prompts;
  };
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(std::get<Ids>(prompts("[1, 2]")[0]), Ids({1, 2}));
  EXPECT_EQ(prompts(R"(["a", "b"])").size(), 2u);
  EXPECT_EQ(std::get<std::string>(prompts(R"(["a", "b"])")[1]), "b");
  EXPECT_EQ(std::get<Ids>(prompts("[[1], [2, 3]]")[1]), Ids({2, 3}));
}

TEST(OpenAiRequest, Chats) {
  const OpenAiRequest request = ReadGood(true, R"({
      "messages": [{"role": "developer", "content": "s"},
                   {"role": "user", "content": [{"type": "text", "text": "a"},
                                                {"type": "text", "text": "b"}], "name": null}],
      "logprobs": true, "top_logprobs": 3, "max_completion_tokens": 5})");
  const GenerateRequest asked = request.For(0);
  const auto& messages = std::get<std::vector<ChatMessage>>(asked.prompt);
  ASSERT_EQ(messages.size(), 2u);
  EXPECT_EQ(messages[0].role, "system");
  EXPECT_EQ(messages[1].content, "a\nb");
  EXPECT_EQ(asked.logprobs, 3);
  EXPECT_EQ(asked.stopping.max_new_tokens, 5);
  EXPECT_EQ(request.max_tokens, "max_completion_tokens");
}

// Messages as OpenAI's Python package 3.57 (ChatCompletionMessage and ParsedChatCompletionMessage,
// by model_dump), LiteLLM and clients of reasoning models send them back.
TEST(OpenAiRequest, MessagesMayComeBackAsTheyWereTold) {
  const auto messages = [](const std::string& text) {
    const OpenAiRequest request = ReadGood(true, R"({"messages": [)" + text + "]}");
    return std::get<std::vector<ChatMessage>>(request.prompts[0]);
  };
  const auto told = messages(R"(
      {"role": "system", "content": "s", "name": "rules"},
      {"role": "user", "name": "ann", "content": [
          {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
      {"role": "assistant", "content": "b", "refusal": null, "annotations": [], "audio": null,
       "function_call": null, "tool_calls": null, "reasoning_content": "why", "reasoning": "why",
       "reasoning_details": [{}], "parsed": {"x": 1}, "provider_specific_fields": {}},
      {"role": "assistant", "content": null, "refusal": "no", "cache_control": {}},
      {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}], "refusal": "no"})");
  ASSERT_EQ(told.size(), 5u);
  EXPECT_EQ(told[0].name, "rules");
  EXPECT_EQ(told[1].name, "ann");
  EXPECT_EQ(told[1].content, "a");
  EXPECT_EQ(told[2].content, "b");
  EXPECT_EQ(told[2].reasoning, "why");
  EXPECT_EQ(told[3].content, "no");
  EXPECT_EQ(told[4].content, "never");
}

// Values that clients write where they mean the default, or no more than one thing.
TEST(OpenAiRequest, ValuesThatSayWhatIsSo) {
  const auto good = [](bool chat, const std::string& fields) {
    const std::string prompt =
        chat ? R"("messages": [{"role": "user", "content": "a"}])" : R"("prompt": "a")";
    return ReadGood(chat, "{" + prompt + ", " + fields + "}");
  };
  const GenerateRequest whole =
      good(false, R"("max_tokens": 4.0, "n": 2.0, "best_of": 2, "seed": 7.0, "top_k": 4e1,
                     "stop_token_ids": [3.0], "logprobs": 1.0)")
          .For(0);
  EXPECT_EQ(whole.stopping.max_new_tokens, 4);
  EXPECT_EQ(whole.sampling.num_candidates, 2);
  EXPECT_EQ(whole.sampling.seed, 7u);
  EXPECT_EQ(whole.sampling.parameters.top_k, 40);
  EXPECT_THAT(whole.stopping.stop_token_ids, ElementsAre(3));
  EXPECT_EQ(whole.logprobs, 1);
  for (const auto& [seed, read] : {std::pair{"18446744073709551615", UINT64_MAX},
                                   {"-9223372036854775808", uint64_t{1} << 63},
                                   {"-1.0", UINT64_MAX},
                                   {"9007199254740992.0", uint64_t{1} << 53}}) {
    EXPECT_EQ(good(false, Str(R"("seed": )", seed)).For(0).sampling.seed, read) << seed;
  }
  for (const char* stop : {R"("")", R"([""])", "[]"}) {
    EXPECT_TRUE(good(false, Str(R"("stop": )", stop)).For(0).stopping.stop_strings.empty());
  }
  EXPECT_THAT(good(false, R"("stop": ["", "b"])").For(0).stopping.stop_strings, ElementsAre("b"));
  EXPECT_FALSE(good(true, R"("logprobs": false, "top_logprobs": 0)").For(0).logprobs);
  EXPECT_FALSE(good(true, R"("stream": false, "stream_options": {"include_usage": true,
                             "include_obfuscation": false}, "store": false, "priority": 3,
                             "parallel_tool_calls": false, "function_call": "auto",
                             "functions": [], "modalities": ["text"], "service_tier": "auto",
                             "metadata": {}, "user": "u", "prediction": {"type": "content"})")
                   .stream);
  // No limit: the context has 64 tokens, one of which is the prompt's.
  for (const char* field : {"max_tokens", "max_completion_tokens"}) {
    const auto valid = ValidateRequest(good(false, Str('"', field, R"(": -1)")).For(0), Model(),
                                       {.max_batch_size = 4, .default_max_new_tokens = 5}, 1);
    ASSERT_EQ(valid.status(), absl::OkStatus());
    EXPECT_EQ(valid->spec.max_new_tokens, 63);
  }
}

// docs/api.md says of every field what becomes of it. The names are those of OpenAI's Python
// package 3.57 (chat/completion_create_params.py and completion_create_params.py) and of vLLM's
// ChatCompletionRequest and CompletionRequest at 002032e, with the guided_... of its older ones,
// and our own.
TEST(OpenAiRequest, TheDocumentHasEveryField) {
  constexpr const char* kNames =
      "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens "
      "max_tokens messages metadata modalities model moderation n parallel_tool_calls prediction "
      "presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention "
      "reasoning_effort response_format safety_identifier seed service_tier stop store stream "
      "stream_options temperature tool_choice tools top_logprobs top_p user verbosity "
      "web_search_options best_of echo prompt suffix thinking_token_budget include_reasoning "
      "use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids "
      "include_stop_str_in_output ignore_eos min_tokens skip_special_tokens "
      "spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs "
      "logprob_token_ids allowed_token_ids bad_words add_generation_prompt continue_final_message "
      "add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs "
      "mm_processor_kwargs structured_outputs priority request_id session_id "
      "return_tokens_as_token_ids return_token_ids routed_experts_prompt_start "
      "return_token_offsets return_prompt_text return_mm_kwargs cache_salt kv_transfer_params "
      "ec_transfer_params vllm_xargs repetition_detection stream_interval prompt_embeds "
      "speculate guided_json guided_regex guided_choice guided_grammar guided_decoding_backend "
      "guided_whitespace_pattern structural_tag logits_processors";
  using Standing = OpenAiField::Standing;
  using Row = std::tuple<std::string, Standing, std::string>;
  std::set<Row> known;
  std::set<std::string> names;
  for (const OpenAiField& field : OpenAiFields()) {
    known.emplace(field.name, field.standing, field.only);
    names.emplace(field.name);
    const bool once = std::ranges::count(OpenAiFields(), field.name, &OpenAiField::name) == 1;
    EXPECT_TRUE(once || field.in != OpenAiIn::kBoth) << field.name;
  }
  EXPECT_THAT(names, testing::UnorderedElementsAreArray(
                         std::vector<std::string>(absl::StrSplit(kNames, ' '))));

  std::ifstream file(TREADLE_SOURCE "/docs/api.md");
  std::string line;
  while (std::getline(file, line) && line != "## What a request says") continue;
  std::set<Row> documented;
  while (std::getline(file, line) && !line.starts_with("## ")) {
    const std::vector<std::string> cells = absl::StrSplit(line, " |");
    if (!line.starts_with("|") || cells.size() < 5) continue;
    const bool only = absl::StartsWith(cells[3], " only `");
    const std::vector<std::string> value = absl::StrSplit(cells[3], '`');
    const Standing standing = only                       ? Standing::kOnly
                              : cells[3] == " no effect" ? Standing::kIgnored
                              : cells[3] == " refused"   ? Standing::kRefused
                                                         : Standing::kTaken;
    const std::vector<std::string> parts = absl::StrSplit(cells[1], '`');
    for (size_t i = 1; i < parts.size(); i += 2) {
      const std::string name = parts[i].substr(0, parts[i].find('.'));
      if (!std::isupper(name[0])) documented.emplace(name, standing, only ? value[1] : "");
    }
  }
  EXPECT_THAT(documented, testing::ContainerEq(known));
}

TEST(OpenAiRequest, WhatTheAnswerMustLookLike) {
  using Kind = Constraint::Kind;
  const auto constraint = [](const std::string& field) {
    return ReadGood(false, R"({"prompt": "a", )" + field + "}").For(0).constraint;
  };
  // The schema as it is written: its properties stay in their order.
  const auto schema = constraint(
      R"("response_format" : {"json_schema": {"name": "n", "strict": true, "schema":
         {"z": "}\"", "a": [1, {"schema": 2}]} }, "type": "json_schema"})");
  ASSERT_TRUE(schema);
  EXPECT_EQ(schema->kind, Kind::kJsonSchema);
  EXPECT_THAT(schema->text, HasSubstr(R"({"z": "}\"", "a": [1, {"schema": 2}]})"));
  EXPECT_EQ(schema->field, "response_format");
  EXPECT_EQ(constraint(R"("response_format": {"type": "json_object"})")->kind, Kind::kJsonObject);
  EXPECT_FALSE(constraint(R"("response_format": {"type": "text"})"));
  EXPECT_EQ(constraint(R"("structured_outputs": {"json": {"z": 1, "a": 2}})")->text,
            R"({"z": 1, "a": 2})");
  EXPECT_EQ(constraint(R"("structured_outputs": {"json": "{}", "regex": null})")->text, "{}");
  EXPECT_EQ(constraint(R"("structured_outputs": {"regex": "a+"})")->kind, Kind::kRegex);
  EXPECT_EQ(constraint(R"("structured_outputs": {"grammar": "root ::= x"})")->kind, Kind::kGrammar);
  EXPECT_THAT(constraint(R"("structured_outputs": {"choice": ["a", "b"]})")->choices,
              ElementsAre("a", "b"));
  EXPECT_FALSE(constraint(R"("structured_outputs": {"json_object": false})"));
  // Without a form of its own, it is of the other one.
  const auto free = constraint(R"("response_format": {"type": "json_object"},
                                  "structured_outputs": {"disable_any_whitespace": false})");
  EXPECT_TRUE(free && free->any_whitespace);
  EXPECT_FALSE(constraint(R"("structured_outputs": {"disable_any_whitespace": true,
                             "json": {}})")
                   ->any_whitespace);
  // llama.cpp's form (tools/server/README.md), and vLLM's before structured_outputs.
  const auto object =
      constraint(R"("response_format": {"schema": {"z": 1, "a": 2}, "type": "json_object"})");
  EXPECT_EQ(object->kind, Kind::kJsonSchema);
  EXPECT_EQ(object->text, R"({"z": 1, "a": 2})");
  EXPECT_EQ(constraint(R"("guided_json": {"z": 1, "a": 2})")->text, R"({"z": 1, "a": 2})");
  EXPECT_EQ(constraint(R"("guided_json": "{}")")->text, "{}");
  EXPECT_EQ(constraint(R"("guided_regex": "a+")")->kind, Kind::kRegex);
  EXPECT_EQ(constraint(R"("guided_grammar": "root ::= x")")->text, "root ::= x");
  const auto choice = constraint(R"("guided_choice": ["a", "b"], "guided_decoding_backend": "x")");
  EXPECT_THAT(choice->choices, ElementsAre("a", "b"));
  EXPECT_EQ(choice->field, "guided_choice");
}

struct Bad {
  bool chat;
  std::string body;
  std::string message;  // of the error
  std::string param;
};

// Through the door too, as a call goes.
HttpResponse Refusal(const Bad& bad) {
  const OpenAiKind kind = bad.chat ? OpenAiKind::kChat : OpenAiKind::kCompletion;
  const auto read = ReadOpenAiRequest(bad.body, bad.chat, Model());
  if (!read.ok()) return OpenAiError(read.status(), kind);
  const auto valid = ValidateRequest(read->For(0), Model(), {.max_batch_size = 4}, 1);
  return OpenAiError(valid.status(), kind, read->max_tokens);
}

TEST(OpenAiRequest, WhatIsWrongIsNamed) {
  std::string many = R"({"prompt": [)";
  for (int i = 0; i < 129; ++i) many += i > 0 ? R"(,"a")" : R"("a")";
  const std::string message = R"({"messages": [{"role": "user", "content": "a"}], )";
  const Bad cases[] = {
      {false, R"({"prompt": "a", "top_p": 1.5})", "top_p is 1.5, expected (0, 1]", "top_p"},
      {false, R"({"prompt": "a", "top_p": "1"})", "top_p is \"1\", expected a number", "top_p"},
      {false, R"({"prompt": "a", "n": 5})",
       "n is 5, expected 1 to 4 (the server's --max-batch-size)", "n"},
      {false, R"({"prompt": "a", "max_tokens": 0})", "max_tokens is 0, expected at least 1",
       "max_tokens"},
      {true, message + R"("max_completion_tokens": 0})", "messages: this model has no usable chat",
       "messages"},
      {false, R"({"prompt": "a", "max_tokens": 64})",
       "max_tokens is 64 after 1 prompt tokens, expected at most 63", "max_tokens"},
      {false, R"({"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2})",
       "max_tokens is 1, but max_completion_tokens is 2, expected one of them", "max_tokens"},
      {false, R"({"prompt": "a", "min_tokens": 9, "max_tokens": 8})",
       "min_tokens is 9, expected 0 to the most new tokens (8)", "min_tokens"},
      {false, R"({"prompt": "a", "logit_bias": {"50": 1}})",
       "logit_bias[0].token_id is 50, expected 0 to 49", "logit_bias"},
      {false, R"({"prompt": "a", "logit_bias": {"x": 1}})",
       "logit_bias['x'] is 1, expected a number, by a token's id", "logit_bias"},
      {false, Str(R"({"prompt": "a", "stop": [")", std::string(513, 'x'), R"("]})"),
       "stop[0] has 513 bytes, expected 1 to 512", "stop"},
      {false, R"({"prompt": "a", "stop": [1]})", "stop[0] is 1, expected a string", "stop"},
      {false, R"({"prompt": "a", "logprobs": 21})", "logprobs is 21, expected 0 to 20", "logprobs"},
      {true, message + R"("logprobs": true, "top_logprobs": 21})",
       "top_logprobs is 21, expected 0 to 20", "top_logprobs"},
      {true, message + R"("top_logprobs": 1})",
       "top_logprobs is given, expected logprobs to be true then", "top_logprobs"},
      {false, R"({"prompt": "a1"})", "prompt: '1' is no letter, expected a to z", "prompt"},
      {false, R"({"prompt": [1, 99]})", "prompt[1] is 99, expected 0 to 49", "prompt"},
      {false, R"({"prompt": [1, "a"]})", "prompt[1] is \"a\", expected a token id", "prompt"},
      {false, R"({"prompt": []})", "prompt is [], expected a string, token ids, or an array",
       "prompt"},
      {false, R"({"prompt": ""})", "prompt is empty, expected at least one token", "prompt"},
      {false, R"({})", "prompt is missing", "prompt"},
      {false, many + "]}", "prompt has 129 entries, expected at most 128", "prompt"},
      {false, R"({"prompt": "a", "stream": true, "stream_options": {"x": true}})",
       "stream_options.x is not supported", "stream_options"},
      {false, R"({"prompt": "a", "max_token": 2})",
       "max_token is not supported; did you mean 'max_tokens'?", "max_token"},
      {true, message + R"("temperatur": 1})",
       "temperatur is not supported; did you mean 'temperature'?", "temperatur"},
      {false, R"({"prompt": "a", "stream": true, "stream_options": {"includ_usage": true}})",
       "stream_options.includ_usage is not supported; did you mean 'include_usage'?",
       "stream_options"},
      {false, R"({"prompt": "a", "best_of": 2})", "best_of is 2, expected n (1)", "best_of"},
      {false, R"({"prompt": "a", "suffix": "b"})", R"(suffix is "b", expected "")", "suffix"},
      {false, R"({"prompt": "a", "use_beam_search": true})",
       "use_beam_search is true, expected false", "use_beam_search"},
      {false, R"({"prompt": "a", "seed": 1.5})", "seed is 1.5, expected a whole number of 64 bits",
       "seed"},
      {false, R"({"prompt": "a", "seed": 18446744073709551616})", "seed is 1.844", "seed"},
      {false, R"({"prompt": "a", "max_tokens": 4.5})", "max_tokens is 4.5, expected a whole number",
       "max_tokens"},
      {false, R"({"prompt": "a", "max_tokens": -2})", "max_tokens is -2, expected at least 1",
       "max_tokens"},
      {true, message + R"("modalities": ["text", "audio"]})",
       R"(modalities is ["text","audio"], expected ["text"])", "modalities"},
      {true, message + R"("function_call": {"name": "f"}})",
       R"(function_call is {"name":"f"}, expected "none" or "auto")", "function_call"},
      {true, message + R"("audio": {}})", "audio is not supported", "audio"},
      {true, message + R"("suffix": ""})", "suffix is not supported", "suffix"},
      {true, message + R"("response_format": {"type": "json_object", "schema": "x"}})",
       "response_format.schema is \"x\", expected an object", "response_format"},
      {true, message + R"("guided_choice": "x"})",
       "guided_choice is \"x\", expected an array of strings", "guided_choice"},
      {true, message + R"("guided_regex": "a", "guided_json": {}})",
       "guided_regex is given, expected not together with guided_json", "guided_regex"},
      {false, R"({"prompt": "a", "messages": []})", "messages is not supported", "messages"},
      {true, message + R"("tool_choice": "required"})", "tool_choice is a demand", "tool_choice"},
      {true, message + R"("functions": [{}]})", "functions is [{}], expected []", "functions"},
      {true, message + R"("response_format": {"type": "xml"}})",
       "response_format.type is \"xml\", expected \"text\", \"json_object\" or", "response_format"},
      {true, message + R"("response_format": {"type": "json_schema"}})",
       "response_format.json_schema is null, expected an object with a schema", "response_format"},
      {true, message + R"("response_format": {"type": "json_object", "x": 1}})",
       "response_format.x is not supported", "response_format"},
      {false, R"({"prompt": "a", "structured_outputs": {"json": 7}})",
       "structured_outputs.json is 7, expected a string", "structured_outputs"},
      {false, R"({"prompt": "a", "structured_outputs": {"whitespace_pattern": "x"}})",
       "structured_outputs.whitespace_pattern is not supported", "structured_outputs"},
      {false, R"({"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["b"]}})",
       "structured_outputs is given, expected not together with structured_outputs",
       "structured_outputs"},
      {false, R"({"prompt": "a", "structured_outputs": {"regex": "a"}, "ignore_eos": true})",
       "ignore_eos is true, expected false with structured_outputs", "ignore_eos"},
      {false, R"({"prompt": "a", "structured_outputs": {"choice": []}})",
       "structured_outputs: ", "structured_outputs"},
      {true, R"({"messages": []})", "messages: this model has no usable chat template", "messages"},
      {true, R"({"messages": [{"role": "user"}]})", "messages[0].content is missing", "messages"},
      {true, R"({"messages": [{"role": "user", "content": "a", "refusal": "b"}]})",
       "messages[0].refusal is not supported in a message of this role", "messages"},
      {true, R"({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "b"}}]})",
       "messages[0].audio is not supported in a message of this role", "messages"},
      {true,
       R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}]})",
       "messages[0].content[0].x is not supported", "messages"},
      {true, R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})",
       "messages[0].content[0].type is \"image_url\", expected \"text\"", "messages"},
      {false, R"({"prompt": "a", "temperature": 1e99})", "temperature is inf, expected a finite",
       "temperature"},
      {false, R"({"prompt": "a", "n": 4294967297})", "n is 4294967297, expected a whole number",
       "n"},
      {false, R"({"prompt": "a", "n": 18446744073709551615})",
       "n is 18446744073709551615, expected a whole number of 32 bits", "n"},
      {false, R"({"prompt" "a"})", "the body: is not valid JSON at byte 13", ""},
      {false, "", "the body: is not valid JSON at byte 1", ""},
      {false, std::string(R"({"prompt":"a"})") + '\0', "the body: is not valid JSON at byte 15",
       ""},
      {false, "[]", "the body: expected a JSON object", ""},
      {false, R"({"prompt": "a", "prompt": "b"})", "the body: key 'prompt' appears twice", ""},
      {false, "{\"prompt\": \"\xff\"}", "the body is not valid UTF-8 at byte 12", ""},
      {false, R"({"prompt": )" + std::string(65, '[') + std::string(65, ']') + "}",
       "the body: is nested more than 64 levels deep", ""}};
  for (const Bad& bad : cases) {
    const HttpResponse response = Refusal(bad);
    EXPECT_EQ(response.code, 400) << bad.body;
    const Json error = Json::parse(response.body)["error"];
    EXPECT_THAT(error["message"].get<std::string>(), HasSubstr(bad.message)) << bad.body;
    EXPECT_EQ(error["param"], bad.param.empty() ? Json() : Json(bad.param)) << bad.body;
    EXPECT_EQ(error["type"], "invalid_request_error");
  }
}

TEST(OpenAiErrors, StatusesHaveTheirCodes) {
  EXPECT_EQ(Refusal({false, R"({"prompt": "a", "model": "gpt\"4"})", "", ""}).body,
            R"({"error":{"message":"the model \"gpt\\\"4\" does not exist, expected \"m\"",)"
            R"("type":"invalid_request_error","param":"model","code":"model_not_found"}})");
  const auto code = [](absl::Status status) { return OpenAiError(status).code; };
  EXPECT_EQ(code(absl::UnauthenticatedError("")), 401);
  EXPECT_EQ(code(absl::PermissionDeniedError("")), 403);
  EXPECT_EQ(code(absl::ResourceExhaustedError("")), 429);
  EXPECT_EQ(code(absl::UnavailableError("")), 503);
  EXPECT_EQ(code(absl::DeadlineExceededError("")), 504);
  EXPECT_EQ(code(absl::CancelledError("")), 499);
  EXPECT_EQ(code(absl::UnknownError("")), 500);
  const HttpResponse full = OpenAiError(absl::ResourceExhaustedError("the queue is full"));
  EXPECT_THAT(full.headers, ElementsAre(testing::Pair("Retry-After", "1")));
  EXPECT_THAT(OpenAiError(WithRetryAfter(absl::ResourceExhaustedError("late"), 6.2)).headers,
              ElementsAre(testing::Pair("Retry-After", "7")));
  EXPECT_EQ(full.body,
            R"({"error":{"message":"the queue is full","type":"rate_limit_error","param":null,)"
            R"("code":"rate_limit_exceeded"}})");
}

// -- answers --------------------------------------------------------------------------------------

}  // namespace
}  // namespace treadle
