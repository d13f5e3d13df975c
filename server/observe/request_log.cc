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

// What the server is to blame for.
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

// What the log keeps of a refusal. Two of them quote the client: a role that is none, and what a
// chat template says of the messages. Of these the field remains.
std::string WithoutPrompt(std::string_view message) {
  if (!message.starts_with("chat")) return std::string(message);
  return Str(std::string(message.substr(0, message.find_first_of(" :"))), " was refused");
}

double Microseconds(double seconds) { return std::round(seconds * 1e6) / 1e6; }

std::string CodeOf(const absl::Status& status) { return absl::StatusCodeToString(status.code()); }

class Fields {
 public:
  Fields(const RequestOrigin& origin, const std::string& model) {
    AddIfAny("request_id", origin.id);
    AddIfAny("x_request_id", origin.header_id);
    AddIfAny("api_key", origin.key);
    AddIfAny("client", origin.client);
    AddIfAny("model", model);
  }
  Fields& AddIfAny(const char* key, std::string value) {
    if (!value.empty()) fields_.push_back({key, std::move(value)});
    return *this;
  }
  Fields& Add(const char* key, int64_t value) {
    fields_.push_back({key, value});
    return *this;
  }
  Fields& AddSeconds(const char* key, double seconds) {
    fields_.push_back({key, Microseconds(seconds)});
    return *this;
  }
  std::vector<LogField> Take() { return std::move(fields_); }

 private:
  std::vector<LogField> fields_;
};

}  // namespace

void RequestLog::Finished(const RequestOrigin& origin, const FinishedRequest& request) const {
  if (!sink_) return;
  Fields fields(origin, model_);
  fields.Add("request", static_cast<int64_t>(request.number))
      .AddIfAny("status", CodeOf(request.status))
      .AddIfAny("finish_reason", ReasonOf(request))
      .AddIfAny("error", std::string(request.status.message()))
      .Add("prompt_tokens", request.prompt_tokens)
      .Add("generated_tokens", request.generated_tokens)
      .AddSeconds("queued_seconds", request.timings.queued);
  if (request.timings.first_token > 0) {
    fields.AddSeconds("first_token_seconds", request.timings.first_token);
  }
  fields.AddSeconds("total_seconds", request.timings.total);
  sink_({.severity = SeverityOf(request.status),
         .name = "request_finished",
         .message = "request finished",
         .fields = fields.Take(),
         .text = LogEvent::Text::kMessageAndFields});
}

void RequestLog::Refused(const RequestOrigin& origin, const absl::Status& status) const {
  if (!sink_) return;
  Fields fields(origin, model_);
  const std::string message(status.message());
  fields.AddIfAny("status", CodeOf(status)).AddIfAny("error", WithoutPrompt(message));
  sink_({.severity = SeverityOf(status),
         .name = "request_refused",
         .message = "request refused",
         .fields = fields.Take(),
         .text = LogEvent::Text::kMessageAndFields});
}

std::string PrintableId(std::string_view text) {
  std::string id(text.substr(0, kMaxHeaderIdBytes));
  std::replace_if(
      id.begin(), id.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return id;
}

}  // namespace treadle
