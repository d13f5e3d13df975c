#include "server/openai/openai_request.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_split.h"
#include "base/json_file.h"
#include "base/number.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/openai/body_fields.h"
#include "server/openai/form_fields.h"
#include "server/openai/json/json_fields.h"
#include "server/openai/json/json_text.h"
#include "server/openai/openai_messages.h"
#include "server/openai/tools/generic_tools.h"
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

absl::Status ReadMessages(const Json& value, OpenAiRequest& to) {
  TREADLE_ASSIGN_OR_RETURN(std::vector<ChatMessage> messages, treadle::ReadMessages(value));
  const auto calls = [](const ChatMessage& message) {
    return !message.tool_calls.empty() || message.role == "tool";
  };
  to.knows_tools |= std::ranges::any_of(messages, calls);
  to.prompts.emplace_back(std::move(messages));
  return absl::OkStatus();
}

absl::Status ReadSeed(const Json& value, OpenAiRequest& to) {
  const std::optional<Json> whole = WholeNumber(value);
  if (!whole) return Expected("seed", value, "a whole number of 64 bits");
  to.common.sampling.seed = whole->get<uint64_t>();  // negative ones too
  return absl::OkStatus();
}

// An empty string stops nothing, and says so.
absl::Status ReadStop(const Json& value, OpenAiRequest& to) {
  const auto add = [&to](const std::string& name, const Json& stop) -> absl::Status {
    TREADLE_ASSIGN_OR_RETURN(std::string text, ReadText(name, stop));
    if (!text.empty()) to.common.stopping.stop_strings.push_back(std::move(text));
    return absl::OkStatus();
  };
  if (!value.is_array()) return add("stop", value);
  for (size_t i = 0; i < value.size(); ++i) {
    TREADLE_RETURN_IF_ERROR(add(Str("stop[", i, "]"), value[i]));
  }
  return absl::OkStatus();
}

absl::Status ReadLogitBias(const Json& value, OpenAiRequest& to) {
  if (!value.is_object()) return Expected("logit_bias", value, "an object from ids to numbers");
  for (const auto& [key, bias] : value.items()) {
    const std::optional<int32_t> token = NumberIn<int32_t>(key);
    if (!token || !bias.is_number()) {
      return Expected(Str("logit_bias['", Cut(key, kShown), "']"), bias,
                      "a number, by a token's id");
    }
    to.common.sampling.parameters.logit_bias.push_back({*token, bias.get<float>()});
  }
  return absl::OkStatus();
}

// Without effect unless the answer is streamed.
absl::Status ReadStreamOptions(const Json& value, OpenAiRequest& to) {
  if (!value.is_object()) return Expected("stream_options", value, "an object");
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
    TREADLE_RETURN_IF_ERROR(Set(ReadBool("stream_options." + key, option), *field));
  }
  return absl::OkStatus();
}

absl::Status ReadMaxTokens(std::string_view name, const Json& value, OpenAiRequest& to) {
  std::optional<int32_t>& most = to.common.stopping.max_new_tokens;
  const std::optional<int32_t> other = most;
  TREADLE_RETURN_IF_ERROR(Set(ReadInt(name, value), most));
  to.max_tokens = name;
  if (!other || other == most) return absl::OkStatus();
  return InvalidArgument(name, " is ", *most, ", but max_completion_tokens is ", *other,
                         ", expected one of them");
}

// Two shapes: a number in completions; a flag and a number in chats.
absl::Status ReadLogprobs(const Json& value, OpenAiRequest& to) {
  std::optional<int32_t>& most = to.common.logprobs;
  if (!to.chat) return Set(ReadInt("logprobs", value), most);
  TREADLE_ASSIGN_OR_RETURN(const bool wanted, ReadBool("logprobs", value));
  if (wanted) most = 0;
  return absl::OkStatus();
}
absl::Status ReadTopLogprobs(const Json& value, OpenAiRequest& to) {
  if (to.common.logprobs) return Set(ReadInt("top_logprobs", value), to.common.logprobs);
  if (value == 0) return absl::OkStatus();
  return InvalidArgument("top_logprobs is given, expected logprobs to be true then");
}

// Variables of the model's template, but for those that the server sets.
absl::Status ReadTemplateArguments(const Json& value, OpenAiRequest& to) {
  constexpr std::string_view kName = "chat_template_kwargs";
  constexpr std::string_view kSet[] = {
      "add_generation_prompt", "bos_token", "documents", "eos_token", "messages", "tools"};
  if (!value.is_object()) return Expected(kName, value, "an object");
  for (const auto& [key, argument] : value.items()) {
    if (std::ranges::find(kSet, key) == std::end(kSet)) {
      to.template_arguments[key] = argument;
      continue;
    }
    return InvalidArgument(kName, ".", key, " is given, expected variables of the template that ",
                           "the server does not set itself");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadReasoningEffort(std::string_view name, const Json& value, OpenAiRequest& to) {
  constexpr std::string_view kEfforts[] = {"none", "minimal", "low", "medium", "high", "xhigh"};
  TREADLE_ASSIGN_OR_RETURN(const std::string effort, ReadText(name, value));
  if (std::ranges::find(kEfforts, effort) == std::end(kEfforts)) {
    return Expected(name, value, R"("none", "minimal", "low", "medium", "high" or "xhigh")");
  }
  const bool thinks = effort != kEfforts[0];
  Json arguments = {{"enable_thinking", thinks}, {"thinking", thinks}};
  if (thinks) arguments["reasoning_effort"] = effort;
  arguments.update(to.template_arguments);  // which comes first, and says more
  to.template_arguments = std::move(arguments);
  return absl::OkStatus();
}

namespace {

constexpr const char* kGuided[] = {"guided_choice", "guided_grammar", "guided_json",
                                   "guided_regex"};
template <int i>
absl::Status ReadGuidedField(const Json& value, OpenAiRequest& to) {
  return ReadGuided(kGuided[i], value, to.form);
}

using enum OpenAiIn;
using enum OpenAiField::Standing;

struct Field {
  const char* name;
  OpenAiIn in;
  absl::Status (*read)(const Json& value, OpenAiRequest& to);
};

// All that are taken but kSamplingFields. In the order in which JSON objects are kept, by name.
constexpr Field kFields[] = {
    {"add_generation_prompt", kChat,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("add_generation_prompt", value), to.common.add_generation_prompt);
     }},
    {"add_special_tokens", kCompletions,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("add_special_tokens", value), to.common.add_special_tokens);
     }},
    {"best_of", kCompletions,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadInt("best_of", value), to.best_of);
     }},
    {"cache_salt", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadText("cache_salt", value), to.common.cache_salt);
     }},
    {"chat_template_kwargs", kChat, ReadTemplateArguments},
    {"continue_final_message", kChat,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("continue_final_message", value), to.common.continue_final_message);
     }},
    {"echo", kCompletions,
     [](const Json& value, OpenAiRequest& to) { return Set(ReadBool("echo", value), to.echo); }},
    {kGuided[0], kBoth, ReadGuidedField<0>},
    {kGuided[1], kBoth, ReadGuidedField<1>},
    {kGuided[2], kBoth, ReadGuidedField<2>},
    {kGuided[3], kBoth, ReadGuidedField<3>},
    {"ignore_eos", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("ignore_eos", value), to.common.stopping.ignore_eos);
     }},
    {"include_reasoning", kChat,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("include_reasoning", value), to.include_reasoning);
     }},
    {"include_stop_str_in_output", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("include_stop_str_in_output", value),
                  to.common.stopping.include_stop_string);
     }},
    {"logit_bias", kBoth, ReadLogitBias},
    {"logprobs", kBoth, ReadLogprobs},
    {"max_completion_tokens", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return ReadMaxTokens("max_completion_tokens", value, to);
     }},
    {"max_tokens", kBoth,
     [](const Json& value, OpenAiRequest& to) { return ReadMaxTokens("max_tokens", value, to); }},
    {"messages", kChat, ReadMessages},
    {"min_tokens", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadInt("min_tokens", value), to.common.stopping.min_new_tokens);
     }},
    {"model", kBoth, [](const Json&, OpenAiRequest&) { return absl::OkStatus(); }},  // see ReadBody
    {"n", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadInt("n", value), to.common.sampling.num_candidates);
     }},
    {"parallel_tool_calls", kChat,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("parallel_tool_calls", value), to.reading.parallel);
     }},
    {"priority", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadInt("priority", value), to.common.priority);
     }},
    {"prompt", kCompletions,
     [](const Json& value, OpenAiRequest& to) { return ReadPrompts("prompt", value, to); }},
    {"prompt_logprobs", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       to.prompt_logprobs = true;
       return Set(ReadInt("prompt_logprobs", value), to.common.prompt_logprobs);
     }},
    {"reasoning_effort", kChat,
     [](const Json& value, OpenAiRequest& to) {
       return ReadReasoningEffort("reasoning_effort", value, to);
     }},
    {"response_format", kBoth,
     [](const Json& value, OpenAiRequest& to) { return ReadResponseFormat(value, to.form); }},
    {"return_token_ids", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("return_token_ids", value), to.token_ids);
     }},
    {"seed", kBoth, ReadSeed},
    {"skip_special_tokens", kBoth,
     [](const Json& value, OpenAiRequest& to) -> absl::Status {
       TREADLE_ASSIGN_OR_RETURN(const bool skip, ReadBool("skip_special_tokens", value));
       to.common.special_tokens = !skip;
       return absl::OkStatus();
     }},
    {"speculate", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadText("speculate", value), to.common.speculate);
     }},
    {"stop", kBoth, ReadStop},
    {"stop_token_ids", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadIds("stop_token_ids", value), to.common.stopping.stop_token_ids);
     }},
    {"stream", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("stream", value), to.stream);
     }},
    {"stream_options", kBoth, ReadStreamOptions},
    {"structured_outputs", kBoth,
     [](const Json& value, OpenAiRequest& to) { return ReadStructuredOutputs(value, to.form); }},
    {"tool_choice", kChat,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadToolChoice(value), to.tool_choice);
     }},
    {"tools", kChat,
     [](const Json& value, OpenAiRequest& to) { return Set(ReadTools(value), to.tools); }},
    {"top_logprobs", kChat, ReadTopLogprobs},
    {"truncate_prompt_tokens", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadInt("truncate_prompt_tokens", value), to.common.truncate_prompt_tokens);
     }},
};

// The others.
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

bool IsIn(OpenAiIn in, bool chat) {
  return (static_cast<int>(in) & static_cast<int>(chat ? kChat : kCompletions)) != 0;
}

}  // namespace

absl::Status PassOver(const OpenAiField& field, const Json& value) {
  if (field.standing == kIgnored) return absl::OkStatus();
  for (const absl::string_view only :
       absl::StrSplit(absl::string_view(field.only.data(), field.only.size()), " or ")) {
    if (value == Json::parse(only.begin(), only.end(), nullptr, false)) return absl::OkStatus();
  }
  if (field.standing == kOnly) return Expected(field.name, value, field.only);
  return InvalidArgument(field.name, " is not supported");
}

absl::Status ReadSampling(const SamplingField& field, const Json& value, OpenAiRequest& to) {
  if (const auto* real = std::get_if<float SamplingParameters::*>(&field.member)) {
    if (!value.is_number()) return Expected(field.name, value, "a number");
    to.common.sampling.parameters.*(*real) = value.get<float>();
    return absl::OkStatus();
  }
  TREADLE_ASSIGN_OR_RETURN(const int32_t top_k, ReadInt(field.name, value));
  to.common.sampling.parameters.top_k = top_k == -1 ? 0 : top_k;  // both mean: off
  return absl::OkStatus();
}

namespace {

absl::Status ReadField(const std::string& name, const Json& value, OpenAiRequest& to) {
  for (const SamplingField& field : kSamplingFields) {
    if (field.name == name) return ReadSampling(field, value, to);
  }
  for (const Field& field : kFields) {
    if (field.name == name && IsIn(field.in, to.chat)) return field.read(value, to);
  }
  for (const OpenAiField& field : kOtherFields) {
    if (field.name == name && IsIn(field.in, to.chat)) return PassOver(field, value);
  }
  std::vector<std::string_view> known;
  for (const SamplingField& field : kSamplingFields) known.push_back(field.name);
  for (const Field& field : kFields) {
    if (IsIn(field.in, to.chat)) known.emplace_back(field.name);
  }
  return Unsupported("", name, known);
}

absl::Status CheckEndOfPrompt(const Json& object, const OpenAiRequest& to) {
  if (!to.common.continue_final_message || object.value("add_generation_prompt", Json()) != true) {
    return absl::OkStatus();
  }
  return InvalidArgument(
      "continue_final_message is true, expected add_generation_prompt to be "
      "false then");
}

// Checks what holds between several fields.
absl::Status Conclude(std::string_view body, OpenAiRequest& to) {
  if (to.prompts.empty()) return InvalidArgument(to.chat ? "messages" : "prompt", " is missing");
  const int32_t n = to.common.sampling.num_candidates;
  if (to.best_of && *to.best_of != n) {
    return InvalidArgument("best_of is ", *to.best_of, ", expected n (", n,
                           "): there is no choice of the best");
  }
  if (to.stream && to.prompt_logprobs) {
    return InvalidArgument("prompt_logprobs is given, expected stream to be false then");
  }
  to.common.constraint = std::move(to.form.constraint);
  if (!to.form.schema_path.empty()) {
    for (const std::string_view name : to.form.schema_path) body = MemberText(body, name);
    to.common.constraint->text = body;
  }
  if (to.echo && to.common.logprobs) {
    std::optional<int32_t>& most = to.common.prompt_logprobs;
    most = std::max(most.value_or(0), *to.common.logprobs);
  }
  std::optional<int32_t>& most_new = to.common.stopping.max_new_tokens;
  if (most_new == -1) {  // llama.cpp's
    most_new.reset();
    to.common.stopping.without_limit = true;
  }
  if (to.echo && most_new == 0) {
    to.prompt_only = true;
    most_new = 1;
  }
  return absl::OkStatus();
}

// `body`: what the request was read from. Tools that may not be called are not told to the model.
absl::Status ConcludeTools(std::string_view body, const ServedModel& model, OpenAiRequest& to) {
  const bool demanded = to.tool_choice.mode == ToolChoice::Mode::kRequired;
  if (demanded && to.tools.empty()) {
    return InvalidArgument("tool_choice is a demand for a call, expected tools then");
  }
  const bool offered = !to.tools.empty() && to.tool_choice.mode != ToolChoice::Mode::kNone;
  if ((!offered && !to.knows_tools) || !model.chat_template) return absl::OkStatus();
  const std::string_view written = !offered                      ? ""
                                   : to.tools_as_of_chat.empty() ? MemberText(body, "tools")
                                                                 : to.tools_as_of_chat;
  const ToolFormat* format = FindToolFormat(model.chat_template->source());
  const bool generic = format == nullptr;
  if (generic) {
    format = &GenericToolFormat();
    WriteToolsAsText(written, *model.chat_template,
                     std::get<std::vector<ChatMessage>>(to.prompts[0]));
  }
  if (!offered) return absl::OkStatus();
  // An answer that is nothing but calls, or a form, is held to it.
  const bool held = demanded || to.common.constraint;
  to.reading.tools = held ? &format->Held() : format;
  for (const Tool& tool : to.tools) to.reading.texts[tool.name] = tool.texts;
  if (!generic) to.common.tools = written;
  // Some models mark calls with special tokens.
  to.common.special_tokens = true;
  // A model that was never taught to call writes broken JSON easily.
  const bool always = generic && model.constraints && model.constraints->Works();
  return ConstrainCalls(written, to.tools, to.tool_choice, to.reading.parallel, always,
                        *to.reading.tools, to.common.constraint);
}

// Notes what the template shows of how the model thinks. `to.common.constraint` holds what is said.
void ConcludeReasoning(const ServedModel& model, OpenAiRequest& to) {
  if (!model.chat_template || !model.tokenizer) return;
  if (!to.template_arguments.empty()) to.common.template_arguments = to.template_arguments.dump();
  to.reading.reasoning = FindReasoningFormat(model.chat_template->source());
  if (to.reading.reasoning == nullptr) return;
  to.common.special_tokens = true;  // some mark with them
  if (to.common.continue_final_message) {
    const auto& messages = std::get<std::vector<ChatMessage>>(to.prompts[0]);
    const std::string text = messages.empty() ? "" : messages.back().content.value_or("");
    to.reading.thinking = ThinkingWithin(text, *to.reading.reasoning);
  } else {
    to.reading.thinking = ThinkingOfChats(to.common, *to.reading.reasoning, model);
  }
  std::optional<Constraint>& constraint = to.common.constraint;
  if (!constraint || to.reading.thinking == Thinking::kOver) return;
  const ReasoningFormat& format = *to.reading.reasoning;
  // A form allows no control tokens, so the prompt itself goes on with what is said.
  if (format.harmony()) {
    to.common.prompt_end = "<|channel|>final<|message|>";
  } else if (ClosesByControlToken(format, model)) {
    if (to.reading.thinking == Thinking::kBegun) to.common.prompt_end = format.close;
    to.reading.thinking = Thinking::kOver;
  } else {
    constraint->thought = {std::string(format.open), std::string(format.close),
                           to.reading.thinking == Thinking::kBegun};
  }
}

}  // namespace

absl::StatusOr<Json> ReadBody(std::string_view body, const ServedModel& model) {
  if (const size_t bad = FindInvalidUtf8(body); bad != std::string_view::npos) {
    return InvalidArgument("the body is not valid UTF-8 at byte ", bad);
  }
  TREADLE_ASSIGN_OR_RETURN(Json object, ParseJsonObject(body, "the body", kMaxJsonValues));
  const Json name = object.value("model", Json());
  if (name.is_null()) return object;
  if (!name.is_string()) return Expected("model", name, "a string");
  if (model.IsCalled(name.get_ref<const std::string&>())) return object;
  return NotFound("the model ", Cut(name.dump(), kShown), " does not exist, expected ",
                  Json(model.name).dump());
}

absl::Status ConcludeBody(std::string_view body, const ServedModel& model, OpenAiRequest& to) {
  TREADLE_RETURN_IF_ERROR(Conclude(body, to));
  TREADLE_RETURN_IF_ERROR(ConcludeTools(body, model, to));
  if (to.chat) ConcludeReasoning(model, to);
  if (to.common.constraint) to.common.constraint->any_whitespace = to.form.any_whitespace;
  return absl::OkStatus();
}

absl::StatusOr<OpenAiRequest> ReadOpenAiRequest(std::string_view body, bool chat,
                                                const ServedModel& model) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  OpenAiRequest request{.chat = chat};
  request.common.sampling.parameters = model.sampling();
  for (const auto& [name, value] : object.items()) {
    if (!value.is_null()) TREADLE_RETURN_IF_ERROR(ReadField(name, value, request));
  }
  TREADLE_RETURN_IF_ERROR(CheckEndOfPrompt(object, request));
  TREADLE_RETURN_IF_ERROR(ConcludeBody(body, model, request));
  return request;
}

std::vector<OpenAiField> OpenAiFields() {
  std::vector<OpenAiField> fields(std::begin(kOtherFields), std::end(kOtherFields));
  for (const Field& field : kFields) fields.push_back({field.name, field.in, kTaken});
  for (const SamplingField& field : kSamplingFields) fields.push_back({field.name, kBoth, kTaken});
  return fields;
}

bool SameRequest(std::string_view body, std::string_view other) {
  if (body == other) return true;
  const auto json = ParseJsonObject(body, ""), other_json = ParseJsonObject(other, "");
  return json.ok() && other_json.ok() && *json == *other_json;
}

absl::StatusOr<OpenAiRequest> ReadEmbeddings(std::string_view body, const ServedModel& model) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  OpenAiRequest request{.common = {.embedding = true}};
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || name == "model" || name == "user") continue;
    if (name == "input") {
      TREADLE_RETURN_IF_ERROR(ReadPrompts(name, value, request));
    } else if (name == "encoding_format") {
      request.base64 = value == "base64";
      if (!request.base64 && value != "float")
        return Expected(name, value, R"("float" or "base64")");
    } else if (name == "add_special_tokens") {
      TREADLE_RETURN_IF_ERROR(Set(ReadBool(name, value), request.common.add_special_tokens));
    } else if (name == "truncate_prompt_tokens") {
      TREADLE_RETURN_IF_ERROR(Set(ReadInt(name, value), request.common.truncate_prompt_tokens));
    } else if (name == "dimensions") {
      TREADLE_RETURN_IF_ERROR(Set(ReadInt(name, value), request.common.dimensions));
      if (request.common.dimensions < 1) return Expected(name, value, "1 or more");
    } else {
      constexpr std::string_view kKnown[] = {"input",
                                             "encoding_format",
                                             "add_special_tokens",
                                             "dimensions",
                                             "truncate_prompt_tokens",
                                             "model",
                                             "user",
                                             "priority",
                                             "metadata",
                                             "request_id"};
      if (std::ranges::find(kKnown + 6, std::end(kKnown), name) != std::end(kKnown)) continue;
      return Unsupported("", name, kKnown);
    }
  }
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
  TREADLE_RETURN_IF_ERROR(Conclude(body, request));
  TREADLE_RETURN_IF_ERROR(ConcludeTools(body, model, request));
  ConcludeReasoning(model, request);
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
