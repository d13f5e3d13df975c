#include "server/openai/openai_errors.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "base/retry_after.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/openai/json/json_text.h"

namespace treadle {
namespace {

constexpr size_t kMaxMessageBytes = 1024;  // as gRPC's

struct Meaning {
  absl::StatusCode status;
  int http;
  const char* type;
  const char* code;  // null: none
};
constexpr Meaning kMeanings[] = {
    {absl::StatusCode::kInvalidArgument, 400, "invalid_request_error", nullptr},
    {absl::StatusCode::kFailedPrecondition, 400, "invalid_request_error", nullptr},
    {absl::StatusCode::kUnauthenticated, 401, "invalid_request_error", "invalid_api_key"},
    {absl::StatusCode::kPermissionDenied, 403, "permission_error", "key_suspended"},
    {absl::StatusCode::kNotFound, 404, "invalid_request_error", "model_not_found"},
    {absl::StatusCode::kAlreadyExists, 409, "invalid_request_error", "already_exists"},
    {absl::StatusCode::kAborted, 409, "invalid_request_error", "aborted"},
    {absl::StatusCode::kResourceExhausted, 429, "rate_limit_error", "rate_limit_exceeded"},
    {absl::StatusCode::kCancelled, 499, "cancelled", nullptr},
    {absl::StatusCode::kUnavailable, 503, "server_error", "unavailable"},
    {absl::StatusCode::kDeadlineExceeded, 504, "timeout", "deadline_exceeded"},
    {absl::StatusCode::kInternal, 500, "server_error", "internal_error"},  // and all others
};

const Meaning& MeaningOf(absl::StatusCode status) {
  const auto found = std::ranges::find(kMeanings, status, &Meaning::status);
  return found == std::end(kMeanings) ? kMeanings[std::size(kMeanings) - 1] : *found;
}

// The field that is asked about.
const char* PromptOf(OpenAiKind kind) {
  constexpr const char* kNames[] = {"prompt", "messages", "input", "messages", "input", "a text"};
  return kNames[static_cast<size_t>(kind)];
}

// Sessions' names of fields, the longer one of two that begin alike first, and OpenAI's.
using Names = std::vector<std::pair<absl::string_view, absl::string_view>>;
Names NamesFor(OpenAiKind kind, std::string_view max_tokens) {
  return {{"sampling.num_candidates", "n"},
          {"sampling.", ""},
          {"stopping.max_new_tokens", {max_tokens.data(), max_tokens.size()}},
          {"stopping.min_new_tokens", "min_tokens"},
          {"stopping.ignore_eos", "ignore_eos"},
          {"to max_new_tokens (", "to the most new tokens ("},
          {"stopping.stop_strings", kind == OpenAiKind::kMessage ? "stop_sequences" : "stop"},
          {"stopping.stop_token_ids", "stop_token_ids"},
          {"response.logprobs", kind == OpenAiKind::kCompletion ? "logprobs" : "top_logprobs"},
          {"response.prompt_logprobs", "prompt_logprobs"},
          {"token_ids.ids", PromptOf(kind)},
          {"chat.messages", PromptOf(kind)}};
}
// The same where they begin a message; elsewhere they are words of the language. With what follows.
constexpr std::pair<absl::string_view, absl::string_view> kStarts[] = {
    {"chat: ", ": "}, {"text: ", ": "}, {"text ", " "}, {"text[", "["}, {"prompt ", " "}};

// The message's first word, if that is a field's name.
std::string ParamOf(const std::string& message) {
  const size_t end = message.find_first_not_of("abcdefghijklmnopqrstuvwxyz_");
  const std::string_view rest = std::string_view(message).substr(std::min(end, message.size()));
  const bool field = rest.starts_with(" is ") || rest.starts_with(" has ") ||
                     rest.starts_with(": ") || rest.starts_with("[") || rest.starts_with(".");
  return field && end > 0 ? message.substr(0, end) : "";
}

HttpResponse Error(int http, const std::string& message, const char* type, const char* code,
                   const std::string& param, int64_t retry_seconds = 1) {
  HttpResponse response{.code = http, .content_type = "application/json"};
  response.body =
      Str(R"({"error":{"message":)", JsonString(Cut(message, kMaxMessageBytes)), R"(,"type":")",
          type, R"(","param":)", param.empty() ? "null" : JsonString(param), R"(,"code":)",
          code == nullptr ? "null" : JsonString(code), "}}");
  if (http == 429 || http == 503) response.headers = {{"Retry-After", Str(retry_seconds)}};
  return response;
}

}  // namespace

HttpResponse OpenAiError(const absl::Status& status, OpenAiKind kind, std::string_view max_tokens) {
  const Meaning& meaning = MeaningOf(status.code());
  std::string message(status.message());
  if (meaning.http == 401) absl::StrReplaceAll({{"the metadata '", "the header '"}}, &message);
  if (meaning.http != 400) {
    return Error(meaning.http, message, meaning.type, meaning.code,
                 meaning.http == 404 ? "model" : "", RetryAfterSeconds(status));
  }
  const bool chat =
      kind == OpenAiKind::kChat || kind == OpenAiKind::kMessage || kind == OpenAiKind::kResponse;
  for (const auto& [start, end] : kStarts) {
    if (!absl::StartsWith(message, start) || (chat && absl::StartsWith(start, "text"))) continue;
    // /tokenize has both, and is otherwise as completions.
    const bool both = kind == OpenAiKind::kCompletion && start == "chat: ";
    message.replace(0, start.size(), Str(PromptOf(both ? OpenAiKind::kChat : kind), end));
    break;
  }
  message = absl::StrReplaceAll(message, NamesFor(kind, max_tokens));
  return Error(meaning.http, message, meaning.type, meaning.code, ParamOf(message));
}

HttpResponse OpenAiRefusal(int code, const std::string& message) {
  return Error(code, message, code < 500 ? "invalid_request_error" : "server_error", nullptr, "");
}

}  // namespace treadle
