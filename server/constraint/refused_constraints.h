// Constraints that were refused after a trial, which costs seconds: for a while they are refused
// again without one. Kept by digest, the latest ones.
//
// Thread safety: any thread.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "base/sync.h"
#include "server/constraint/prepared_constraint.h"

namespace treadle {

class RefusedConstraints {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  static constexpr size_t kMaxKept = 4096;
  static constexpr std::chrono::minutes kFor{5};

  void Add(const PreparedConstraint& constraint, absl::Status why, TimePoint now)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Ok if it was not refused in the last minutes.
  absl::Status Find(const PreparedConstraint& constraint, TimePoint now) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Refusal {
    absl::Status why;
    TimePoint until;
  };

  mutable Mutex mutex_;
  std::map<std::string, Refusal> by_digest_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> order_ ABSL_GUARDED_BY(mutex_);  // the oldest first
};

}  // namespace treadle
