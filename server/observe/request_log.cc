#include "server/observe/request_log.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

// As the ledger names it.
std::string ReasonOf(const FinishedRequest& request) {
  switch (request.status.code()) {
    case absl::StatusCode::kOk:
      break;
    case absl::StatusCode::kCancelled:
      return "cancelled";
    case absl::StatusCode::kDeadlineExceeded:
      return "deadline";
    default:
      return "error";
  }
  std::string reasons;
  for (const FinishReason reason : request.reasons) {
    reasons += reasons.empty() ? "" : ",";
    reasons += reason == FinishReason::kLength ? "length" : "stop";
  }
  return reasons;
}

// The severity of a status: high where the server is to blame.
Severity SeverityOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDataLoss:
      return Severity::kWarning;
    default:
      return Severity::kInfo;
  }
}

// The part of a refusal that the log keeps. Two of them quote the client: a role that is none, and
// what a chat template says of the messages. Only the field of these remains.
std::string WithoutPrompt(std::string_view message) {
  if (!message.starts_with("chat")) return std::string(message);
  return Str(std::string(message.substr(0, message.find_first_of(" :"))), " was refused");
}

using Fields = std::vector<LogField>;

void AddIfAny(Fields& fields, const char* key, std::string value) {
  if (!value.empty()) fields.push_back({key, std::move(value)});
}

void AddSeconds(Fields& fields, const char* key, double seconds) {
  fields.push_back({key, std::round(seconds * 1e6) / 1e6});
}

// An event that says who asked.
LogEvent Event(const char* outcome, const RequestOrigin& origin, const std::string& model,
               const absl::Status& status) {
  LogEvent event{.severity = SeverityOf(status),
                 .name = Str("request_", outcome),
                 .message = Str("request ", outcome),
                 .text = LogEvent::Text::kMessageAndFields};
  AddIfAny(event.fields, "request_id", origin.id);
  AddIfAny(event.fields, "x_request_id", origin.header_id);
  AddIfAny(event.fields, "api_key", origin.key);
  AddIfAny(event.fields, "client", origin.client);
  AddIfAny(event.fields, "model", model);
  return event;
}

}  // namespace

void RequestLog::Finished(const RequestOrigin& origin, const FinishedRequest& request) const {
  if (!sink_) return;
  LogEvent event = Event("finished", origin, model_, request.status);
  Fields& fields = event.fields;
  fields.push_back({"request", static_cast<int64_t>(request.number)});
  fields.push_back({"status", absl::StatusCodeToString(request.status.code())});
  AddIfAny(fields, "finish_reason", ReasonOf(request));
  AddIfAny(fields, "error", std::string(request.status.message()));
  fields.push_back({"prompt_tokens", int64_t{request.prompt_tokens}});
  fields.push_back({"generated_tokens", int64_t{request.generated_tokens}});
  AddSeconds(fields, "queued_seconds", request.timings.queued);
  if (request.timings.first_token > 0) {
    AddSeconds(fields, "first_token_seconds", request.timings.first_token);
  }
  AddSeconds(fields, "total_seconds", request.timings.total);
  sink_(std::move(event));
}

void RequestLog::Refused(const RequestOrigin& origin, const absl::Status& status) const {
  if (!sink_) return;
  LogEvent event = Event("refused", origin, model_, status);
  event.fields.push_back({"status", absl::StatusCodeToString(status.code())});
  AddIfAny(event.fields, "error", WithoutPrompt(std::string(status.message())));
  sink_(std::move(event));
}

std::string PrintableId(std::string_view text) {
  std::string id(text.substr(0, kMaxHeaderIdBytes));
  std::replace_if(
      id.begin(), id.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return id;
}

}  // namespace treadle
