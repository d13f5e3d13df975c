#include "server/observe/refusals.h"

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/cord.h"

namespace treadle {
namespace {

constexpr char kPayload[] = "treadle/refusal";  // a word of kRefusals

}  // namespace

absl::Status Because(std::optional<RefusalReason> reason, absl::Status status) {
  const std::string_view word = reason ? WordOf(kRefusals, *reason) : "none";
  status.SetPayload(kPayload, absl::Cord(std::string(word)));
  return status;
}

std::optional<RefusalReason> ReasonOf(const absl::Status& status) {
  if (const auto word = status.GetPayload(kPayload)) {
    return ValueOf(kRefusals, std::string(*word));
  }
  switch (status.code()) {
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
      return RefusalReason::kUnauthorized;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kUnimplemented:
      return RefusalReason::kInvalid;
    case absl::StatusCode::kResourceExhausted:
      return RefusalReason::kQueueFull;
    case absl::StatusCode::kUnavailable:
      return RefusalReason::kDraining;
    case absl::StatusCode::kDeadlineExceeded:
      return RefusalReason::kDeadline;
    case absl::StatusCode::kOk:
    case absl::StatusCode::kCancelled:
      return std::nullopt;
    default:
      return RefusalReason::kError;
  }
}

absl::Status RefusalCounts::Add(absl::Status status) {
  if (const auto reason = ReasonOf(status)) Add(*reason);
  return status;
}

}  // namespace treadle
