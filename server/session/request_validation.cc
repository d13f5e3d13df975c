#include "server/session/request_validation.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_set>
#include <utility>
#include <variant>

#include "base/quoted.h"
#include "base/status.h"
#include "base/utf8.h"
#include "scheduler/policy.h"
#include "server/observe/refusals.h"

namespace treadle {
namespace {

// A parameter that was not asked has its default, which is allowed. A count of 0 is off.
absl::Status CheckField(const SamplingField& field, const GenerateRequest::Sampling& sampling) {
  const auto check = [&field](auto value) -> absl::Status {
    if (field.Allows(value)) return absl::OkStatus();
    return InvalidArgument("sampling.", field.name, " is ", value, ", expected ", field.expected,
                           std::is_same_v<decltype(value), int32_t> ? ", or 0 for off" : "");
  };
  if (const auto* real = std::get_if<float SamplingParameters::*>(&field.member)) {
    return check(sampling.parameters.*(*real));
  }
  const int32_t count = sampling.parameters.*std::get<int32_t SamplingParameters::*>(field.member);
  return count == 0 ? absl::OkStatus() : check(count);
}

absl::Status CheckCount(std::string_view field, size_t entries, size_t most) {
  if (entries <= most) return absl::OkStatus();
  return InvalidArgument(field, " has ", entries, " entries, expected at most ", most);
}

// Words behind a number of tokens, some of which are a soft prompt's.
std::string OfSoftPrompt(int32_t virtual_tokens) {
  return virtual_tokens == 0 ? "" : Str(" (", virtual_tokens, " of them the adapter's)");
}

// `most`: the context, or what leaves room for an answer in it.
absl::Status CheckPromptLength(int64_t tokens, int64_t most, const ServedModel& model,
                               int32_t virtual_tokens = 0) {
  if (tokens <= most) return absl::OkStatus();
  const std::string context = most == model.max_context
                                  ? ""
                                  : Str(" is ", model.max_context, " with at least one new token");
  return Because(RefusalReason::kTooLong,
                 InvalidArgument("prompt has ", tokens, " tokens", OfSoftPrompt(virtual_tokens),
                                 ", expected at most ", most, " (the context", context, ")"));
}

absl::Status CheckLogitBias(const std::vector<LogitBias>& entries, int32_t vocab) {
  TREADLE_RETURN_IF_ERROR(CheckCount("sampling.logit_bias", entries.size(), kMaxLogitBias));
  std::unordered_set<int32_t> seen;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto& [token, bias] = entries[i];
    const std::string where = Str("sampling.logit_bias[", i, "]");
    if (token < 0 || token >= vocab) {
      return InvalidArgument(where, ".token_id is ", token, ", expected 0 to ", vocab - 1);
    }
    if (!std::isfinite(bias) || std::abs(bias) > 100) {
      return InvalidArgument(where, ".bias is ", bias, ", expected [-100, 100]");
    }
    if (!seen.insert(token).second) {
      return InvalidArgument(where, ".token_id is ", token,
                             ", which an earlier entry has; expected each token once");
    }
  }
  return absl::OkStatus();
}

absl::Status ReadSampling(GenerateRequest::Sampling& sampling, const ServedModel& model,
                          const RequestLimits& limits, uint64_t random_seed, RequestSpec& spec) {
  for (const SamplingField& field : kSamplingFields) {
    TREADLE_RETURN_IF_ERROR(CheckField(field, sampling));
  }
  const int32_t n = sampling.num_candidates;
  if (n < 1 || n > limits.max_batch_size) {
    return InvalidArgument("sampling.num_candidates is ", n, ", expected 1 to ",
                           limits.max_batch_size, " (the server's --max-batch-size)");
  }
  TREADLE_RETURN_IF_ERROR(CheckLogitBias(sampling.parameters.logit_bias, model.vocab));
  spec.sampling = std::move(sampling.parameters);
  spec.sampling.seed = sampling.seed.value_or(random_seed);
  spec.candidates = n;
  return absl::OkStatus();
}

// A rendered conversation without what a template writes behind its last message. As transformers'
// apply_chat_template: white space at the message's end stays only where the template has it.
absl::StatusOr<std::string> UpToEndOf(const ChatMessage& last, std::string rendered) {
  constexpr std::string_view kSpace = " \t\r\n";
  const std::string content = last.content.value_or("");
  const size_t length = content.find_last_not_of(kSpace) + 1;
  const size_t begin = std::min(content.find_first_not_of(kSpace), length);
  const std::string_view words = std::string_view(content).substr(begin, length - begin);
  size_t at = words.empty() ? rendered.npos : rendered.rfind(words);
  if (at == rendered.npos) {
    return InvalidArgument("chat: continue_final_message is true, expected a last message whose ",
                           "text the template shows as it is");
  }
  at += words.size();
  if (rendered.compare(at, content.size() - length, content, length) == 0) {
    at += content.size() - length;
  }
  rendered.resize(at);
  return rendered;
}

}  // namespace

absl::StatusOr<std::vector<int32_t>> PromptIds(GenerateRequest& request, const ServedModel& model,
                                               Clock::time_point deadline) {
  if (std::holds_alternative<std::monostate>(request.prompt)) {
    return InvalidArgument("prompt is missing, expected one of text, token_ids, chat");
  }
  if (auto* ids = std::get_if<std::vector<int32_t>>(&request.prompt)) {
    if (ids->empty()) {
      return InvalidArgument("token_ids.ids is empty, expected at least one token");
    }
    TREADLE_RETURN_IF_ERROR(ValidateTokenIds("token_ids.ids", *ids, model.vocab));
    return std::move(*ids);
  }

  const auto* messages = std::get_if<std::vector<ChatMessage>>(&request.prompt);
  const char* field = messages ? "chat" : "text";
  if (!model.tokenizer) {
    return InvalidArgument(field, ": this model has no tokenizer, expected token_ids");
  }
  std::string text;
  EncodeOptions options;
  if (messages) {
    TREADLE_ASSIGN_OR_RETURN(text, RenderChat(*messages, request, model, deadline));
    text += request.prompt_end;
    options.add_special = false;  // the template wrote what the model wants
  } else {
    text = std::move(std::get<std::string>(request.prompt));
    options.add_special = request.add_special_tokens;
  }
  if (Clock::now() >= deadline) return absl::DeadlineExceededError("the deadline passed");
  auto prompt = model.tokenizer->Encode(text, options);
  if (!prompt.ok()) {
    return InvalidArgument(field, ": ", std::string(prompt.status().message()));
  }
  if (prompt->empty()) {
    return InvalidArgument(field, " is empty, expected at least one token");
  }
  // A tokenizer may know more ids than the model has rows.
  TREADLE_RETURN_IF_ERROR(ValidateTokenIds(field, *prompt, model.vocab));
  return prompt;
}

namespace {

// Keeps the prompt's last tokens. `most`: that there is room for.
absl::Status Truncate(const std::optional<int32_t>& asked, int64_t most,
                      std::vector<int32_t>& prompt) {
  if (!asked) return absl::OkStatus();
  if (*asked < -1 || *asked == 0 || *asked > most) {
    return InvalidArgument("truncate_prompt_tokens is ", *asked, ", expected 1 to ", most,
                           ", or -1 for what the context has room for");
  }
  const int64_t kept = *asked == -1 ? most : *asked;
  const int64_t beyond = static_cast<int64_t>(prompt.size()) - kept;
  if (beyond > 0) prompt.erase(prompt.begin(), prompt.begin() + beyond);
  return absl::OkStatus();
}

// Reads the prompt, behind what the adapter's soft prompt replaces. `most`: tokens that there is
// room for.
absl::Status ReadPrompt(GenerateRequest& request, const ServedModel& model,
                        Clock::time_point deadline, int64_t most, RequestSpec& spec) {
  TREADLE_ASSIGN_OR_RETURN(spec.prompt, PromptIds(request, model, deadline));
  spec.virtual_tokens = request.virtual_tokens;
  most -= spec.virtual_tokens;
  if (most >= 1) {
    TREADLE_RETURN_IF_ERROR(Truncate(request.truncate_prompt_tokens, most, spec.prompt));
  }
  spec.prompt.insert(spec.prompt.begin(), static_cast<size_t>(spec.virtual_tokens), 0);
  return absl::OkStatus();
}

// The most tokens that the request may generate within the context and the cache; may be <= 0.
int64_t MostNewTokens(int64_t prompt, int64_t candidates, const ServedModel& model) {
  const auto fits = [&](int64_t tokens) {
    return model.paging.Needed(prompt, prompt + tokens, candidates).FitsIn(model.kv_pages);
  };
  int64_t most = 0, beyond = model.max_context - prompt + 1;
  while (beyond - most > 1) {
    const int64_t middle = std::midpoint(most, beyond);
    (fits(middle) ? most : beyond) = middle;
  }
  return most;
}

absl::Status ReadLengths(const GenerateRequest::Stopping& stopping, const ServedModel& model,
                         const RequestLimits& limits, RequestSpec& spec) {
  const int64_t prompt = static_cast<int64_t>(spec.prompt.size());
  TREADLE_RETURN_IF_ERROR(
      CheckPromptLength(prompt, model.max_context - 1, model, spec.virtual_tokens));
  const int64_t most = MostNewTokens(prompt, spec.candidates, model);
  const int64_t usual =
      stopping.without_limit ? most : std::min<int64_t>(limits.default_max_new_tokens, most);
  spec.max_new_tokens =
      stopping.max_new_tokens.value_or(static_cast<int32_t>(std::max<int64_t>(1, usual)));
  if (stopping.without_limit && spec.max_new_tokens > most) {
    spec.max_new_tokens = static_cast<int32_t>(std::max<int64_t>(1, most));
  }
  if (spec.max_new_tokens < 1) {
    return InvalidArgument("stopping.max_new_tokens is ", spec.max_new_tokens,
                           ", expected at least 1");
  }
  if (prompt + spec.max_new_tokens > model.max_context) {
    return Because(
        RefusalReason::kTooLong,
        InvalidArgument("stopping.max_new_tokens is ", spec.max_new_tokens, " after ", prompt,
                        " prompt tokens", OfSoftPrompt(spec.virtual_tokens), ", expected at most ",
                        model.max_context - prompt, " (the context is ", model.max_context, ")"));
  }
  const PageCounts pages = PagesNeeded(spec, model.paging);
  if (!pages.FitsIn(model.kv_pages)) {
    return Because(
        RefusalReason::kUnsatisfiable,
        InvalidArgument("the request needs ", pages, " K/V pages (", prompt, " prompt tokens, ",
                        "stopping.max_new_tokens ", spec.max_new_tokens,
                        ", sampling.num_candidates ", spec.candidates, "), expected at most ",
                        model.kv_pages, " (the server's --kv-memory)"));
  }
  spec.min_new_tokens = stopping.min_new_tokens;
  if (spec.min_new_tokens < 0 || spec.min_new_tokens > spec.max_new_tokens) {
    return InvalidArgument("stopping.min_new_tokens is ", spec.min_new_tokens,
                           ", expected 0 to max_new_tokens (", spec.max_new_tokens, ")");
  }
  return absl::OkStatus();
}

// Nothing is generated, but a step needs the room of one token.
absl::Status ReadEmbedding(const ServedModel& model, const RequestLimits& limits,
                           RequestSpec& spec) {
  const auto prompt = static_cast<int64_t>(spec.prompt.size());
  spec.pooling = limits.pooling;
  spec.max_new_tokens = 1;
  TREADLE_RETURN_IF_ERROR(CheckPromptLength(prompt, model.max_context, model, spec.virtual_tokens));
  const PageCounts pages = PagesNeeded(spec, model.paging);
  if (pages.FitsIn(model.kv_pages)) return absl::OkStatus();
  return Because(RefusalReason::kUnsatisfiable,
                 InvalidArgument("prompt has ", prompt, " tokens, which need ", pages,
                                 " K/V pages, expected at most ", model.kv_pages,
                                 " (the server's --kv-memory)"));
}

absl::Status ReadStops(GenerateRequest::Stopping& stopping, const ServedModel& model,
                       ValidatedRequest& valid) {
  const std::vector<std::string>& strings = stopping.stop_strings;
  TREADLE_RETURN_IF_ERROR(CheckCount("stopping.stop_strings", strings.size(), kMaxStopStrings));
  if (!strings.empty() && !model.tokenizer) {
    return InvalidArgument(
        "stopping.stop_strings: this model has no tokenizer, expected stop_token_ids");
  }
  for (size_t i = 0; i < strings.size(); ++i) {
    if (strings[i].empty() || strings[i].size() > kMaxStopStringBytes) {
      return InvalidArgument("stopping.stop_strings[", i, "] has ", strings[i].size(),
                             " bytes, expected 1 to ", kMaxStopStringBytes);
    }
  }
  std::vector<int32_t>& ends = stopping.stop_token_ids;
  TREADLE_RETURN_IF_ERROR(CheckCount("stopping.stop_token_ids", ends.size(), kMaxStopTokens));
  TREADLE_RETURN_IF_ERROR(ValidateTokenIds("stopping.stop_token_ids", ends, model.vocab));
  if (!stopping.ignore_eos) {
    for (int32_t id : model.end_ids) {
      if (id >= 0 && id < model.vocab) ends.push_back(id);
    }
  }
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  valid.spec.end_tokens = std::move(ends);
  valid.stop_strings = std::move(stopping.stop_strings);
  return absl::OkStatus();
}

absl::StatusOr<int32_t> ReadLogprobs(const char* field, std::optional<int32_t> asked) {
  if (asked && (*asked < 0 || *asked > kMaxTopLogprobs)) {
    return InvalidArgument("response.", field, " is ", *asked, ", expected 0 to ", kMaxTopLogprobs);
  }
  return asked.value_or(-1);
}

absl::Status ReadConstraint(const std::optional<Constraint>& asked, const ServedModel& model,
                            bool ignore_eos, Clock::time_point deadline, RequestSpec& spec) {
  if (!asked) return absl::OkStatus();
  if (!model.constraints) {
    return InvalidArgument(asked->field, ": this model has no tokenizer, expected none");
  }
  if (ignore_eos) {
    return InvalidArgument("stopping.ignore_eos is true, expected false with ", asked->field);
  }
  if (Clock::now() >= deadline) return absl::DeadlineExceededError("the deadline passed");
  auto compiled = model.constraints->Compile(*asked);
  if (!compiled.ok()) {
    const std::string message = Str(asked->field, ": ", compiled.status().message());
    // The machine is too busy to try it: no fault of the request's.
    if (absl::IsUnavailable(compiled.status())) return absl::UnavailableError(message);
    return InvalidArgument(message);
  }
  spec.constraint = *std::move(compiled);
  return absl::OkStatus();
}

absl::StatusOr<Speculate> ReadSpeculate(const std::string& word, Speculate unsaid) {
  if (word.empty()) return unsaid;
  const bool draft = unsaid == Speculate::kDraft;  // the server has such a model
  const auto value = ValueOf(kSpeculate, word);
  if (value && (*value != Speculate::kDraft || draft)) return *value;
  return InvalidArgument("speculate is '", Cut(Printable(word), 64), "', expected off",
                         draft ? ", ngram or draft" : " or ngram",
                         value ? " (this server has no draft model)" : "");
}

}  // namespace

absl::StatusOr<std::string> RenderChat(const std::vector<ChatMessage>& messages,
                                       const GenerateRequest& request, const ServedModel& model,
                                       Clock::time_point deadline) {
  if (!model.chat_template) {
    return InvalidArgument(
        "chat: this model has no usable chat template",
        model.chat_template_problem.empty() ? "" : " (" + model.chat_template_problem + ")",
        ", expected text or token_ids");
  }
  if (messages.empty()) {
    return InvalidArgument("chat.messages is empty, expected at least one message");
  }
  TREADLE_RETURN_IF_ERROR(CheckCount("chat.messages", messages.size(), kMaxChatMessages));
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    if (role != "system" && role != "user" && role != "assistant" && role != "tool") {
      return InvalidArgument("chat.messages[", i, "].role is ", Quoted(role),
                             ", expected system, user, assistant or tool");
    }
  }
  const TokenizerSpec& spec = model.tokenizer->spec();
  const auto text_of = [&](int32_t id) {
    return id >= 0 && id < model.tokenizer->size() ? spec.tokens[id].text : std::string();
  };
  ChatOptions options;
  options.bos_token = text_of(spec.bos);
  options.eos_token = text_of(spec.eos);
  options.tools = request.tools;
  options.arguments = request.template_arguments;
  const bool goes_on = request.continue_final_message;
  options.add_generation_prompt = request.add_generation_prompt && !goes_on;
  options.deadline = deadline;
  auto rendered = model.chat_template->Render(messages, options);
  if (rendered.ok() && goes_on) return UpToEndOf(messages.back(), *std::move(rendered));
  if (rendered.ok() || absl::IsDeadlineExceeded(rendered.status())) return rendered;
  return InvalidArgument("chat: ", std::string(rendered.status().message()));
}

absl::Status ValidateEntries(std::string_view field, int64_t entries, bool embedding,
                             const ServedModel& model) {
  // So few are parsed: ValidateRequest refuses them then, and the log has the request's id.
  constexpr int64_t kFew = 4096;
  if (entries <= kFew) return absl::OkStatus();
  if (field == "token_ids.ids") {
    return CheckPromptLength(entries, model.max_context - (embedding ? 0 : 1), model);
  }
  if (field == "constraint.choices.choice") {
    if (entries <= static_cast<int64_t>(kMaxChoices)) return absl::OkStatus();
    return InvalidArgument("constraint: has ", entries, " choices, expected 1 to ", kMaxChoices);
  }
  constexpr std::pair<std::string_view, size_t> kMaxEntries[] = {
      {"chat.messages", kMaxChatMessages},
      {"sampling.logit_bias", kMaxLogitBias},
      {"stopping.stop_strings", kMaxStopStrings},
      {"stopping.stop_token_ids", kMaxStopTokens}};
  const auto* const found =
      std::ranges::find(kMaxEntries, field, &std::pair<std::string_view, size_t>::first);
  const size_t most = found == std::end(kMaxEntries) ? kFew : found->second;
  return CheckCount(field, static_cast<size_t>(entries), most);
}

absl::Status ValidateTokenIds(const std::string& field, std::span<const int32_t> ids,
                              int32_t vocab) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) {
      return InvalidArgument(field, "[", i, "] is ", ids[i], ", expected 0 to ", vocab - 1);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ValidatedRequest> ValidateRequest(GenerateRequest request, const ServedModel& model,
                                                 const RequestLimits& limits, uint64_t random_seed,
                                                 Clock::time_point deadline) {
  ValidatedRequest valid;
  RequestSpec& spec = valid.spec;
  if (request.request_id.size() > kMaxRequestIdBytes) {
    return InvalidArgument("request_id has ", request.request_id.size(),
                           " bytes, expected at most ", kMaxRequestIdBytes);
  }
  spec.client_id = std::move(request.request_id);
  if (request.cache_salt.size() > kMaxCacheSaltBytes) {
    return InvalidArgument("cache_salt has ", request.cache_salt.size(),
                           " bytes, expected at most ", kMaxCacheSaltBytes);
  }
  spec.cache_salt = std::move(request.cache_salt);
  TREADLE_ASSIGN_OR_RETURN(spec.speculate, ReadSpeculate(request.speculate, limits.speculate));
  spec.priority = request.priority;
  if (request.embedding) {
    if (limits.pooling == Pooling::kNone) {
      return absl::FailedPreconditionError(
          "this server gives no embeddings: it was started with --embedding-pooling none");
    }
    TREADLE_RETURN_IF_ERROR(ReadPrompt(request, model, deadline, model.max_context, spec));
    TREADLE_RETURN_IF_ERROR(ReadEmbedding(model, limits, spec));
    if (request.dimensions < 0 || request.dimensions > model.hidden) {
      return InvalidArgument("dimensions is ", request.dimensions, ", expected 1 to ",
                             model.hidden);
    }
    valid.generation.dimensions = request.dimensions;
    return valid;
  }
  TREADLE_RETURN_IF_ERROR(ReadSampling(request.sampling, model, limits, random_seed, spec));
  TREADLE_ASSIGN_OR_RETURN(spec.top_logprobs, ReadLogprobs("logprobs", request.logprobs));
  TREADLE_ASSIGN_OR_RETURN(spec.prompt_logprobs,
                           ReadLogprobs("prompt_logprobs", request.prompt_logprobs));
  const bool ignore_eos = request.stopping.ignore_eos;
  TREADLE_RETURN_IF_ERROR(ReadStops(request.stopping, model, valid));
  TREADLE_RETURN_IF_ERROR(ReadPrompt(request, model, deadline, model.max_context - 1, spec));
  TREADLE_RETURN_IF_ERROR(ReadLengths(request.stopping, model, limits, spec));
  valid.generation = {.special_tokens = request.special_tokens,
                      .include_stop_string = request.stopping.include_stop_string};
  TREADLE_RETURN_IF_ERROR(ReadConstraint(request.constraint, model, ignore_eos, deadline, spec));
  return valid;
}

}  // namespace treadle
