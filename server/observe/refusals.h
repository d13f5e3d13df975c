// Refused requests, counted by reason: treadle:requests_refused_total.
//
// A status says by its code why it refuses; Because names a reason that the code does not tell.
//
// Thread safety: all functions from any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>

#include "absl/status/status.h"
#include "base/choice.h"

namespace treadle {

enum class RefusalReason : uint8_t {
  kQueueFull,
  kUnreadFull,
  kRateLimited,
  kTooLong,
  kUnsatisfiable,
  kUnauthorized,
  kInvalid,
  kDraining,
  kStorage,
  kDeadline,
  kError,
};

// The metric's label; docs/api.md explains each.
inline constexpr Choice<RefusalReason> kRefusals[] = {
    {"queue_full", RefusalReason::kQueueFull},
    {"unread_full", RefusalReason::kUnreadFull},
    {"rate_limited", RefusalReason::kRateLimited},
    {"too_long", RefusalReason::kTooLong},
    {"unsatisfiable", RefusalReason::kUnsatisfiable},
    {"unauthorized", RefusalReason::kUnauthorized},
    {"invalid", RefusalReason::kInvalid},
    {"draining", RefusalReason::kDraining},
    {"storage", RefusalReason::kStorage},
    {"deadline", RefusalReason::kDeadline},
    {"error", RefusalReason::kError},
};

// The status with this reason, which ReasonOf gives; its code and message stay. None: it is not to
// be counted.
absl::Status Because(std::optional<RefusalReason> reason, absl::Status status);
// Why a request ends with this status before it is queued; none if it was not refused: its client
// has left.
std::optional<RefusalReason> ReasonOf(const absl::Status& status);

class RefusalCounts {
 public:
  void Add(RefusalReason reason) { ++counts_[static_cast<size_t>(reason)]; }
  // Counts the refused request that this status answers, if it has a reason, and gives it back.
  absl::Status Add(absl::Status status);
  int64_t Of(RefusalReason reason) const { return counts_[static_cast<size_t>(reason)]; }

 private:
  std::array<std::atomic<int64_t>, std::size(kRefusals)> counts_{};
};

}  // namespace treadle
