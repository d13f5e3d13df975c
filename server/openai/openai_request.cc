#include "server/openai/openai_request.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/json_file.h"
#include "base/number.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/openai/body_fields.h"
#include "server/openai/form_fields.h"
#include "server/openai/json/json_fields.h"
#include "server/openai/openai_messages.h"
#include "server/openai/tools/tool_request.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

// -- prompts --------------------------------------------------------------------------------------

// One text, one list of ids, or an array of either.
absl::Status ReadPrompts(const std::string& field, const Json& value, OpenAiRequest& to) {
  const auto add = [&](const std::string& name, const Json& prompt) -> absl::Status {
    if (prompt.is_string()) {
      to.prompts.emplace_back(prompt.get<std::string>());
      return absl::OkStatus();
    }
    TREADLE_ASSIGN_OR_RETURN(std::vector<int32_t> ids, ReadIds(name, prompt));
    to.prompts.emplace_back(std::move(ids));
    return absl::OkStatus();
  };
  if (value.is_array() && value.empty()) {
    return Expected(field, value, "a string, token ids, or an array of either");
  }
  if (!value.is_array() || value[0].is_number()) return add(field, value);
  const size_t most = to.common.embedding ? kMaxInputs : kMaxPrompts;
  if (value.size() > most) {
    return InvalidArgument(field, " has ", value.size(), " entries, expected at most ", most);
  }
  for (size_t i = 0; i < value.size(); ++i) {
    TREADLE_RETURN_IF_ERROR(add(Str(field, "[", i, "]"), value[i]));
  }
  return absl::OkStatus();
}

// -- fields ---------------------------------------------------------------------------------------

absl::Status ReadMessages(const std::string& /*name*/, const Json& value, OpenAiRequest& to) {
  TREADLE_ASSIGN_OR_RETURN(std::vector<ChatMessage> messages, treadle::ReadMessages(value));
  const auto calls = [](const ChatMessage& message) {
    return !message.tool_calls.empty() || message.role == "tool";
  };
  to.knows_tools |= std::ranges::any_of(messages, calls);
  to.prompts.emplace_back(std::move(messages));
  return absl::OkStatus();
}

absl::Status ReadSeed(const std::string& name, const Json& value, OpenAiRequest& to) {
  const std::optional<Json> whole = WholeNumber(value);
  if (!whole) return Expected(name, value, "a whole number of 64 bits");
  to.common.sampling.seed = whole->get<uint64_t>();  // negative ones too
  return absl::OkStatus();
}

// An empty string stops nothing, and says so.
absl::Status ReadStop(const std::string& name, const Json& value, OpenAiRequest& to) {
  const auto add = [&to](const std::string& name, const Json& stop) -> absl::Status {
    TREADLE_ASSIGN_OR_RETURN(std::string text, ReadText(name, stop));
    if (!text.empty()) to.common.stopping.stop_strings.push_back(std::move(text));
    return absl::OkStatus();
  };
  if (!value.is_array()) return add(name, value);
  for (size_t i = 0; i < value.size(); ++i) {
    TREADLE_RETURN_IF_ERROR(add(Str(name, "[", i, "]"), value[i]));
  }
  return absl::OkStatus();
}

absl::Status ReadLogitBias(const std::string& name, const Json& value, OpenAiRequest& to) {
  if (!value.is_object()) return Expected(name, value, "an object from ids to numbers");
  for (const auto& [key, bias] : value.items()) {
    const std::optional<int32_t> token = NumberIn<int32_t>(key);
    if (!token || !bias.is_number()) {
      return Expected(Str(name, "['", Cut(key, kShown), "']"), bias, "a number, by a token's id");
    }
    to.common.sampling.parameters.logit_bias.push_back({*token, bias.get<float>()});
  }
  return absl::OkStatus();
}

// Without effect unless the answer is streamed.
absl::Status ReadStreamOptions(const std::string& name, const Json& value, OpenAiRequest& to) {
  if (!value.is_object()) return Expected(name, value, "an object");
  bool obfuscation = false;  // padding against who measures lengths; there is none
  constexpr std::string_view kKnown[] = {"include_usage", "continuous_usage_stats",
                                         "include_obfuscation"};
  for (const auto& [key, option] : value.items()) {
    bool* const field = key == "include_usage"            ? &to.include_usage
                        : key == "continuous_usage_stats" ? &to.usage_in_chunks
                        : key == "include_obfuscation"    ? &obfuscation
                                                          : nullptr;
    if (option.is_null()) continue;
    if (field == nullptr) return Unsupported("stream_options.", key, kKnown);
    TREADLE_RETURN_IF_ERROR(Set(ReadBool(name + "." + key, option), *field));
  }
  return absl::OkStatus();
}

absl::Status ReadMaxTokens(const std::string& name, const Json& value, OpenAiRequest& to) {
  std::optional<int32_t>& most = to.common.stopping.max_new_tokens;
  const std::optional<int32_t> other = most;
  TREADLE_RETURN_IF_ERROR(Set(ReadInt(name, value), most));
  to.max_tokens = name == "max_tokens" ? "max_tokens" : "max_completion_tokens";
  if (!other || other == most) return absl::OkStatus();
  return InvalidArgument(name, " is ", *most, ", but max_completion_tokens is ", *other,
                         ", expected one of them");
}

// Two shapes: a number in completions; a flag and a number in chats.
absl::Status ReadLogprobs(const std::string& name, const Json& value, OpenAiRequest& to) {
  std::optional<int32_t>& most = to.common.logprobs;
  if (!to.chat) return Set(ReadInt(name, value), most);
  TREADLE_ASSIGN_OR_RETURN(const bool wanted, ReadBool(name, value));
  if (wanted) most = 0;
  return absl::OkStatus();
}
absl::Status ReadTopLogprobs(const std::string& name, const Json& value, OpenAiRequest& to) {
  if (to.common.logprobs) return Set(ReadInt(name, value), to.common.logprobs);
  if (value == 0) return absl::OkStatus();
  return InvalidArgument("top_logprobs is given, expected logprobs to be true then");
}

// Variables of the model's template, but for those that the server sets.
absl::Status ReadTemplateArguments(const std::string& name, const Json& value, OpenAiRequest& to) {
  constexpr std::string_view kSet[] = {
      "add_generation_prompt", "bos_token", "documents", "eos_token", "messages", "tools"};
  if (!value.is_object()) return Expected(name, value, "an object");
  for (const auto& [key, argument] : value.items()) {
    if (std::ranges::find(kSet, key) == std::end(kSet)) {
      to.template_arguments[key] = argument;
      continue;
    }
    return InvalidArgument(name, ".", key, " is given, expected variables of the template that ",
                           "the server does not set itself");
  }
  return absl::OkStatus();
}

template <absl::Status (*Read)(std::string_view, const Json&, AskedForm&)>
absl::Status IntoForm(const std::string& name, const Json& value, OpenAiRequest& to) {
  return Read(name, value, to.form);
}

using enum OpenAiIn;
using enum OpenAiField::Standing;

using Common = GenerateRequest;
using Stopping = GenerateRequest::Stopping;
using Sampling = GenerateRequest::Sampling;
using Reading = AnswerReader::Options;

// All that are taken but kSamplingFields. In the order in which JSON objects are kept, by name.
constexpr BodyField<OpenAiRequest> kFields[] = {
    {"add_generation_prompt",
     Sets<ReadBool, &OpenAiRequest::common, &Common::add_generation_prompt>, kChat},
    {"add_special_tokens", Sets<ReadBool, &OpenAiRequest::common, &Common::add_special_tokens>,
     kCompletions},
    {"best_of", Sets<ReadInt, &OpenAiRequest::best_of>, kCompletions},
    {"cache_salt", Sets<ReadText, &OpenAiRequest::common, &Common::cache_salt>, kBoth},
    {"chat_template_kwargs", ReadTemplateArguments, kChat},
    {"continue_final_message",
     Sets<ReadBool, &OpenAiRequest::common, &Common::continue_final_message>, kChat},
    {"echo", Sets<ReadBool, &OpenAiRequest::echo>, kCompletions},
    {"guided_choice", IntoForm<ReadGuided>, kBoth},
    {"guided_grammar", IntoForm<ReadGuided>, kBoth},
    {"guided_json", IntoForm<ReadGuided>, kBoth},
    {"guided_regex", IntoForm<ReadGuided>, kBoth},
    {"ignore_eos", Sets<ReadBool, &OpenAiRequest::common, &Common::stopping, &Stopping::ignore_eos>,
     kBoth},
    {"include_reasoning", Sets<ReadBool, &OpenAiRequest::include_reasoning>, kChat},
    {"include_stop_str_in_output",
     Sets<ReadBool, &OpenAiRequest::common, &Common::stopping, &Stopping::include_stop_string>,
     kBoth},
    {"logit_bias", ReadLogitBias, kBoth},
    {"logprobs", ReadLogprobs, kBoth},
    {"max_completion_tokens", ReadMaxTokens, kBoth},
    {"max_tokens", ReadMaxTokens, kBoth},
    {"messages", ReadMessages, kChat},
    {"min_tokens",
     Sets<ReadInt, &OpenAiRequest::common, &Common::stopping, &Stopping::min_new_tokens>, kBoth},
    {"model", IsRead<OpenAiRequest>, kBoth},
    {"n", Sets<ReadInt, &OpenAiRequest::common, &Common::sampling, &Sampling::num_candidates>,
     kBoth},
    {"parallel_tool_calls", Sets<ReadBool, &OpenAiRequest::reading, &Reading::parallel>, kChat},
    {"priority", Sets<ReadInt, &OpenAiRequest::common, &Common::priority>, kBoth},
    {"prompt", ReadPrompts, kCompletions},
    {"prompt_logprobs",
     [](const std::string& name, const Json& value, OpenAiRequest& to) {
       to.prompt_logprobs = true;
       return Set(ReadInt(name, value), to.common.prompt_logprobs);
     },
     kBoth},
    {"reasoning_effort", ReadReasoningEffort, kChat},
    {"response_format", IntoForm<ReadResponseFormat>, kBoth},
    {"return_token_ids", Sets<ReadBool, &OpenAiRequest::token_ids>, kBoth},
    {"seed", ReadSeed, kBoth},
    {"skip_special_tokens",
     [](const std::string& name, const Json& value, OpenAiRequest& to) -> absl::Status {
       TREADLE_ASSIGN_OR_RETURN(const bool skip, ReadBool(name, value));
       to.common.special_tokens = !skip;
       return absl::OkStatus();
     },
     kBoth},
    {"speculate", Sets<ReadText, &OpenAiRequest::common, &Common::speculate>, kBoth},
    {"stop", ReadStop, kBoth},
    {"stop_token_ids",
     Sets<ReadIds, &OpenAiRequest::common, &Common::stopping, &Stopping::stop_token_ids>, kBoth},
    {"stream", Sets<ReadBool, &OpenAiRequest::stream>, kBoth},
    {"stream_options", ReadStreamOptions, kBoth},
    {"structured_outputs", IntoForm<ReadStructuredOutputs>, kBoth},
    {"tool_choice", Sets<ReadToolChoice, &OpenAiRequest::tool_choice>, kChat},
    {"tools", Sets<ReadTools, &OpenAiRequest::tools>, kChat},
    {"top_logprobs", ReadTopLogprobs, kChat},
    {"truncate_prompt_tokens",
     Sets<ReadInt, &OpenAiRequest::common, &Common::truncate_prompt_tokens>, kBoth},
};

// The fields of an embedding.
constexpr BodyField<OpenAiRequest> kEmbeddingFields[] = {
    {"input", ReadPrompts},
    {"encoding_format",
     [](const std::string& name, const Json& value, OpenAiRequest& to) {
       to.base64 = value == "base64";
       return to.base64 || value == "float" ? absl::OkStatus()
                                            : Expected(name, value, R"("float" or "base64")");
     }},
    {"add_special_tokens", Sets<ReadBool, &OpenAiRequest::common, &Common::add_special_tokens>},
    {"dimensions",
     [](const std::string& name, const Json& value, OpenAiRequest& to) -> absl::Status {
       TREADLE_RETURN_IF_ERROR(Set(ReadInt(name, value), to.common.dimensions));
       return to.common.dimensions < 1 ? Expected(name, value, "1 or more") : absl::OkStatus();
     }},
    {"truncate_prompt_tokens",
     Sets<ReadInt, &OpenAiRequest::common, &Common::truncate_prompt_tokens>},
    {"model", IsRead<OpenAiRequest>},
    {"user", IsRead<OpenAiRequest>},
    {"priority", IsRead<OpenAiRequest>},
    {"metadata", IsRead<OpenAiRequest>},
    {"request_id", IsRead<OpenAiRequest>},
};

// Fields of the two bodies that generate, but for kFields.
constexpr OpenAiField kOtherFields[] = {
    {"add_special_tokens", kChat, kOnly, "false"},
    {"allowed_token_ids", kBoth, kRefused},
    {"audio", kChat, kRefused},
    {"bad_words", kBoth, kOnly, "[]"},
    {"chat_template", kChat, kRefused},
    {"documents", kChat, kOnly, "[]"},
    {"echo", kChat, kOnly, "false"},
    {"ec_transfer_params", kBoth, kOnly, "{}"},
    {"function_call", kChat, kOnly, R"("none" or "auto")"},
    {"functions", kChat, kOnly, "[]"},
    {"guided_decoding_backend", kBoth, kIgnored},
    {"guided_whitespace_pattern", kBoth, kRefused},
    {"kv_transfer_params", kBoth, kOnly, "{}"},
    {"length_penalty", kBoth, kOnly, "1"},
    {"logits_processors", kBoth, kOnly, "[]"},
    {"logprob_token_ids", kBoth, kRefused},
    {"media_io_kwargs", kChat, kIgnored},
    {"metadata", kBoth, kIgnored},
    {"mm_processor_kwargs", kBoth, kIgnored},
    {"modalities", kChat, kOnly, R"(["text"])"},
    {"moderation", kChat, kRefused},
    {"prediction", kChat, kIgnored},
    {"prompt_cache_key", kBoth, kIgnored},
    {"prompt_cache_options", kChat, kIgnored},
    {"prompt_cache_retention", kChat, kIgnored},
    {"prompt_embeds", kCompletions, kRefused},
    {"repetition_detection", kBoth, kRefused},
    {"request_id", kBoth, kIgnored},
    {"return_mm_kwargs", kBoth, kIgnored},
    {"return_prompt_text", kChat, kOnly, "false"},
    {"return_token_offsets", kBoth, kIgnored},
    {"return_tokens_as_token_ids", kBoth, kOnly, "false"},
    {"routed_experts_prompt_start", kBoth, kOnly, "0"},
    {"safety_identifier", kBoth, kIgnored},
    {"service_tier", kBoth, kIgnored},
    {"session_id", kBoth, kIgnored},
    {"spaces_between_special_tokens", kBoth, kOnly, "true"},
    {"store", kBoth, kIgnored},
    {"stream_interval", kBoth, kIgnored},
    {"structural_tag", kBoth, kRefused},
    {"suffix", kCompletions, kOnly, R"("")"},
    {"thinking_token_budget", kBoth, kOnly, "-1"},
    {"truncation_side", kBoth, kOnly, R"("left")"},
    {"use_beam_search", kBoth, kOnly, "false"},
    {"user", kBoth, kIgnored},
    {"verbosity", kChat, kOnly, R"("medium")"},
    {"vllm_xargs", kBoth, kOnly, "{}"},
    {"watermarking", kBoth, kOnly, "false"},
    {"web_search_options", kChat, kRefused},
};

absl::Status ReadField(const std::string& name, const Json& value, OpenAiRequest& to) {
  return treadle::ReadField<OpenAiRequest>(name, value, kFields, kOtherFields, to);
}

absl::Status CheckEndOfPrompt(const Json& object, const OpenAiRequest& to) {
  if (!to.common.continue_final_message || object.value("add_generation_prompt", Json()) != true) {
    return absl::OkStatus();
  }
  return InvalidArgument(
      "continue_final_message is true, expected add_generation_prompt to be "
      "false then");
}

}  // namespace

absl::StatusOr<OpenAiRequest> ReadOpenAiRequest(std::string_view body, bool chat,
                                                const ServedModel& model) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  OpenAiRequest request{.chat = chat};
  request.common.sampling.parameters = model.sampling();
  request.common.adapter = AdapterNamed(object, model);
  TREADLE_RETURN_IF_ERROR(ReadFields<OpenAiRequest>(object, kFields, kOtherFields, request));
  TREADLE_RETURN_IF_ERROR(CheckEndOfPrompt(object, request));
  TREADLE_RETURN_IF_ERROR(ConcludeBody(body, model, request));
  return request;
}

std::vector<OpenAiField> OpenAiFields() { return ListFields<OpenAiRequest>(kFields, kOtherFields); }

bool SameRequest(std::string_view body, std::string_view other) {
  if (body == other) return true;
  const auto json = ParseJsonObject(body, ""), other_json = ParseJsonObject(other, "");
  return json.ok() && other_json.ok() && *json == *other_json;
}

absl::StatusOr<OpenAiRequest> ReadEmbeddings(std::string_view body, const ServedModel& model) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  OpenAiRequest request{.common = {.embedding = true}};
  request.common.adapter = AdapterNamed(object, model);
  TREADLE_RETURN_IF_ERROR(ReadFields<OpenAiRequest>(object, kEmbeddingFields, {}, request));
  if (request.prompts.empty()) return InvalidArgument("input is missing");
  return request;
}

absl::StatusOr<TokenizeQuestion> ReadTokenize(std::string_view body, const ServedModel& model) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  TokenizeQuestion question;
  const bool chat = object.contains("messages");
  question.add_special = !chat;  // the template has written them
  OpenAiRequest request{.chat = chat};
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || name == "model" || name == "prompt") continue;
    constexpr std::string_view kKnown[] = {"prompt",
                                           "add_special_tokens",
                                           "model",
                                           "messages",
                                           "add_generation_prompt",
                                           "continue_final_message",
                                           "chat_template_kwargs",
                                           "tools"};
    if (name == "add_special_tokens") {
      TREADLE_RETURN_IF_ERROR(Set(ReadBool(name, value), question.add_special));
    } else if (chat && std::ranges::find(kKnown, name) != std::end(kKnown)) {
      TREADLE_RETURN_IF_ERROR(ReadField(name, value, request));
    } else {
      return Unsupported("", name, kKnown);
    }
  }
  if (!chat) {
    TREADLE_RETURN_IF_ERROR(Set(ReadText("prompt", object.value("prompt", Json())), question.text));
    return question;
  }
  TREADLE_RETURN_IF_ERROR(CheckEndOfPrompt(object, request));
  TREADLE_RETURN_IF_ERROR(ConcludeBody(body, model, request));
  TREADLE_RETURN_IF_ERROR(
      Set(RenderChat(std::get<std::vector<ChatMessage>>(request.prompts[0]), request.common, model),
          question.text));
  return question;
}

absl::StatusOr<std::vector<int32_t>> ReadDetokenize(std::string_view body,
                                                    const ServedModel& model) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || name == "model" || name == "tokens") continue;
    constexpr std::string_view kKnown[] = {"tokens", "model"};
    return Unsupported("", name, kKnown);
  }
  return ReadIds("tokens", object.value("tokens", Json()));
}

}  // namespace treadle
