// When the caller of a refused request may try again: carried by the status, and told by front ends
// as Retry-After or RetryInfo. Thread safety: stateless.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"

namespace treadle {

inline constexpr char kRetryAfter[] = "treadle/retry-after";  // payload: seconds, in digits

// After whole seconds, at least 1.
inline absl::Status WithRetryAfter(absl::Status status, double seconds) {
  const auto whole = static_cast<int64_t>(std::max(1.0, std::ceil(seconds)));
  status.SetPayload(kRetryAfter, absl::Cord(std::to_string(whole)));
  return status;
}

// 1 where the status says nothing.
inline int64_t RetryAfterSeconds(const absl::Status& status) {
  const auto seconds = status.GetPayload(kRetryAfter);
  return seconds ? std::stoll(std::string(*seconds)) : 1;
}

}  // namespace treadle
