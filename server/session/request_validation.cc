#include "server/session/request_validation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <unordered_set>

#include "base/status.h"
#include "server/grpc/inference.pb.h"

namespace treadle {
namespace {

// A float field of Sampling: where it is, where it goes, and what it may be.
struct FloatRule {
  const char* name;
  bool (v1::Sampling::*has)() const;
  float (v1::Sampling::*get)() const;
  float SamplingParameters::*target;
  float low;
  bool low_open;
  float high;
  const char* expected;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

const FloatRule kFloatRules[] = {
    {"temperature", &v1::Sampling::has_temperature, &v1::Sampling::temperature,
     &SamplingParameters::temperature, 0, false, kInfinity, "a finite number >= 0"},
    {"top_p", &v1::Sampling::has_top_p, &v1::Sampling::top_p, &SamplingParameters::top_p, 0, true,
     1, "(0, 1]"},
    {"min_p", &v1::Sampling::has_min_p, &v1::Sampling::min_p, &SamplingParameters::min_p, 0, false,
     1, "[0, 1]"},
    {"repetition_penalty", &v1::Sampling::has_repetition_penalty, &v1::Sampling::repetition_penalty,
     &SamplingParameters::repetition_penalty, 0, true, kInfinity, "a finite number > 0"},
    {"presence_penalty", &v1::Sampling::has_presence_penalty, &v1::Sampling::presence_penalty,
     &SamplingParameters::presence_penalty, -2, false, 2, "[-2, 2]"},
    {"frequency_penalty", &v1::Sampling::has_frequency_penalty, &v1::Sampling::frequency_penalty,
     &SamplingParameters::frequency_penalty, -2, false, 2, "[-2, 2]"},
};

absl::Status ReadSampling(const v1::Sampling& sampling, const ServedModel& model,
                          const RequestLimits& limits, uint64_t random_seed, RequestSpec& spec) {
  for (const FloatRule& rule : kFloatRules) {
    if (!(sampling.*rule.has)()) continue;
    const float value = (sampling.*rule.get)();
    const bool inside = std::isfinite(value) && value <= rule.high &&
                        (rule.low_open ? value > rule.low : value >= rule.low);
    if (!inside) {
      return InvalidArgument("sampling.", rule.name, " is ", value, ", expected ", rule.expected);
    }
    spec.sampling.*rule.target = value;
  }
  if (sampling.has_top_k()) {
    if (sampling.top_k() < 1) {
      return InvalidArgument("sampling.top_k is ", sampling.top_k(), ", expected at least 1");
    }
    spec.sampling.top_k = sampling.top_k();
  }
  spec.sampling.seed = sampling.has_seed() ? sampling.seed() : random_seed;

  if (sampling.has_num_candidates()) {
    const int32_t n = sampling.num_candidates();
    if (n < 1 || n > limits.max_batch_size) {
      return InvalidArgument("sampling.num_candidates is ", n, ", expected 1 to ",
                             limits.max_batch_size, " (the server's --max-batch-size)");
    }
    spec.candidates = n;
  }

  if (sampling.logit_bias_size() > kMaxLogitBias) {
    return InvalidArgument("sampling.logit_bias has ", sampling.logit_bias_size(),
                           " entries, expected at most ", kMaxLogitBias);
  }
  std::unordered_set<int32_t> seen;
  for (int i = 0; i < sampling.logit_bias_size(); ++i) {
    const v1::LogitBias& entry = sampling.logit_bias(i);
    const std::string where = Str("sampling.logit_bias[", i, "]");
    if (entry.token_id() < 0 || entry.token_id() >= model.vocab) {
      return InvalidArgument(where, ".token_id is ", entry.token_id(), ", expected 0 to ",
                             model.vocab - 1);
    }
    if (!std::isfinite(entry.bias()) || std::abs(entry.bias()) > 100) {
      return InvalidArgument(where, ".bias is ", entry.bias(), ", expected [-100, 100]");
    }
    if (!seen.insert(entry.token_id()).second) {
      return InvalidArgument(where, ".token_id is ", entry.token_id(),
                             ", which an earlier entry has; expected each token once");
    }
    spec.sampling.logit_bias.push_back({entry.token_id(), entry.bias()});
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> RenderChat(const v1::Chat& chat, const ServedModel& model) {
  if (!model.chat_template) {
    return InvalidArgument(
        "chat: this model has no usable chat template",
        model.chat_template_problem.empty() ? "" : " (" + model.chat_template_problem + ")",
        ", expected text or token_ids");
  }
  if (chat.messages_size() == 0) {
    return InvalidArgument("chat.messages is empty, expected at least one message");
  }
  std::vector<ChatMessage> messages;
  for (int i = 0; i < chat.messages_size(); ++i) {
    const std::string& role = chat.messages(i).role();
    if (role != "system" && role != "user" && role != "assistant") {
      return InvalidArgument("chat.messages[", i, "].role is '", role,
                             "', expected system, user or assistant");
    }
    messages.push_back({role, chat.messages(i).content()});
  }
  const TokenizerSpec& spec = model.tokenizer->spec();
  const auto text_of = [&](int32_t id) {
    return id >= 0 && id < model.tokenizer->size() ? spec.tokens[id].text : std::string();
  };
  ChatOptions options;
  options.bos_token = text_of(spec.bos);
  options.eos_token = text_of(spec.eos);
  auto rendered = model.chat_template->Render(messages, options);
  if (!rendered.ok()) {
    return InvalidArgument("chat: ", std::string(rendered.status().message()));
  }
  return rendered;
}

absl::StatusOr<std::vector<int32_t>> ReadPrompt(const v1::GenerateRequest& request,
                                                const ServedModel& model) {
  using Case = v1::GenerateRequest::PromptCase;
  const Case kind = request.prompt_case();
  if (kind == Case::PROMPT_NOT_SET) {
    return InvalidArgument("prompt is missing, expected one of text, token_ids, chat");
  }
  if (kind == Case::kTokenIds) {
    const auto& ids = request.token_ids().ids();
    std::vector<int32_t> prompt(ids.begin(), ids.end());
    if (prompt.empty()) {
      return InvalidArgument("token_ids.ids is empty, expected at least one token");
    }
    TREADLE_RETURN_IF_ERROR(ValidateTokenIds("token_ids.ids", prompt, model.vocab));
    return prompt;
  }

  const char* field = kind == Case::kChat ? "chat" : "text";
  if (!model.tokenizer) {
    return InvalidArgument(field, ": this model has no tokenizer, expected token_ids");
  }
  std::string text;
  EncodeOptions options;
  if (kind == Case::kChat) {
    TREADLE_ASSIGN_OR_RETURN(text, RenderChat(request.chat(), model));
    options.add_special = false;  // the template wrote what the model wants
  } else {
    text = request.text();
  }
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

// Pages that a request reserves (docs/design.md, Reservation): candidates share the prompt's whole
// pages.
int64_t Pages(int64_t prompt, int64_t max_new_tokens, int64_t candidates, int64_t page_size) {
  const int64_t shared = (prompt - 1) / page_size;
  return shared + candidates * ((prompt + max_new_tokens + page_size - 1) / page_size - shared);
}

// The most tokens that the request may generate within the context and the cache; may be <= 0.
int64_t MostNewTokens(int64_t prompt, int64_t candidates, const ServedModel& model) {
  const int64_t shared = (prompt - 1) / model.page_size;
  const int64_t per_candidate = shared + (model.kv_pages - shared) / candidates;
  return std::min(model.max_context, per_candidate * model.page_size) - prompt;
}

absl::Status ReadLengths(const v1::Stopping& stopping, const ServedModel& model,
                         const RequestLimits& limits, RequestSpec& spec) {
  const int64_t prompt = static_cast<int64_t>(spec.prompt.size());
  if (prompt >= model.max_context) {
    return InvalidArgument("prompt has ", prompt, " tokens, expected at most ",
                           model.max_context - 1, " (the context is ", model.max_context,
                           " with at least one new token)");
  }
  const int64_t most = MostNewTokens(prompt, spec.candidates, model);
  if (!stopping.has_max_new_tokens()) {
    spec.max_new_tokens = static_cast<int32_t>(
        std::max<int64_t>(1, std::min<int64_t>(limits.default_max_new_tokens, most)));
  } else {
    spec.max_new_tokens = stopping.max_new_tokens();
  }
  if (spec.max_new_tokens < 1) {
    return InvalidArgument("stopping.max_new_tokens is ", spec.max_new_tokens,
                           ", expected at least 1");
  }
  if (prompt + spec.max_new_tokens > model.max_context) {
    return InvalidArgument("stopping.max_new_tokens is ", spec.max_new_tokens, " after ", prompt,
                           " prompt tokens, expected at most ", model.max_context - prompt,
                           " (the context is ", model.max_context, ")");
  }
  const int64_t pages = Pages(prompt, spec.max_new_tokens, spec.candidates, model.page_size);
  if (pages > model.kv_pages) {
    return InvalidArgument("the request needs ", pages, " K/V pages (", prompt, " prompt tokens, ",
                           "stopping.max_new_tokens ", spec.max_new_tokens,
                           ", sampling.num_candidates ", spec.candidates, "), expected at most ",
                           model.kv_pages, " (the server's --kv-memory)");
  }
  if (stopping.has_min_new_tokens()) {
    spec.min_new_tokens = stopping.min_new_tokens();
    if (spec.min_new_tokens < 0 || spec.min_new_tokens > spec.max_new_tokens) {
      return InvalidArgument("stopping.min_new_tokens is ", spec.min_new_tokens,
                             ", expected 0 to max_new_tokens (", spec.max_new_tokens, ")");
    }
  }
  return absl::OkStatus();
}

absl::Status ReadStops(const v1::Stopping& stopping, const ServedModel& model,
                       ValidatedRequest& valid) {
  if (stopping.stop_strings_size() > kMaxStopStrings) {
    return InvalidArgument("stopping.stop_strings has ", stopping.stop_strings_size(),
                           " entries, expected at most ", kMaxStopStrings);
  }
  if (stopping.stop_strings_size() > 0 && !model.tokenizer) {
    return InvalidArgument(
        "stopping.stop_strings: this model has no tokenizer, expected stop_token_ids");
  }
  for (int i = 0; i < stopping.stop_strings_size(); ++i) {
    const size_t bytes = stopping.stop_strings(i).size();
    if (bytes < 1 || bytes > kMaxStopStringBytes) {
      return InvalidArgument("stopping.stop_strings[", i, "] has ", bytes, " bytes, expected 1 to ",
                             kMaxStopStringBytes);
    }
    valid.stop_strings.push_back(stopping.stop_strings(i));
  }
  if (stopping.stop_token_ids_size() > kMaxStopTokens) {
    return InvalidArgument("stopping.stop_token_ids has ", stopping.stop_token_ids_size(),
                           " entries, expected at most ", kMaxStopTokens);
  }
  const auto& ids = stopping.stop_token_ids();
  std::vector<int32_t> ends(ids.begin(), ids.end());
  TREADLE_RETURN_IF_ERROR(ValidateTokenIds("stopping.stop_token_ids", ends, model.vocab));
  if (!stopping.ignore_eos()) {
    for (int32_t id : model.end_ids) {
      if (id >= 0 && id < model.vocab) ends.push_back(id);
    }
  }
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  valid.spec.end_tokens = std::move(ends);
  return absl::OkStatus();
}

absl::Status ReadLogprobs(const char* field, int32_t value, int32_t& target) {
  if (value < 0 || value > kMaxTopLogprobs) {
    return InvalidArgument("response.", field, " is ", value, ", expected 0 to ", kMaxTopLogprobs);
  }
  target = value;
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateTokenIds(const std::string& field, std::span<const int32_t> ids,
                              int32_t vocab) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) {
      return InvalidArgument(field, "[", i, "] is ", ids[i], ", expected 0 to ", vocab - 1);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ValidatedRequest> ValidateRequest(const v1::GenerateRequest& request,
                                                 const ServedModel& model,
                                                 const RequestLimits& limits,
                                                 uint64_t random_seed) {
  ValidatedRequest valid;
  RequestSpec& spec = valid.spec;
  if (request.request_id().size() > kMaxRequestIdBytes) {
    return InvalidArgument("request_id has ", request.request_id().size(),
                           " bytes, expected at most ", kMaxRequestIdBytes);
  }
  spec.client_id = request.request_id();
  TREADLE_RETURN_IF_ERROR(ReadSampling(request.sampling(), model, limits, random_seed, spec));
  if (request.response().has_logprobs()) {
    TREADLE_RETURN_IF_ERROR(
        ReadLogprobs("logprobs", request.response().logprobs(), spec.top_logprobs));
  }
  if (request.response().has_prompt_logprobs()) {
    TREADLE_RETURN_IF_ERROR(ReadLogprobs("prompt_logprobs", request.response().prompt_logprobs(),
                                         spec.prompt_logprobs));
  }
  TREADLE_RETURN_IF_ERROR(ReadStops(request.stopping(), model, valid));
  TREADLE_ASSIGN_OR_RETURN(spec.prompt, ReadPrompt(request, model));
  TREADLE_RETURN_IF_ERROR(ReadLengths(request.stopping(), model, limits, spec));
  return valid;
}

}  // namespace treadle
