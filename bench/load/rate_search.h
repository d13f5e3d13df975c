// The search for the highest rate of requests that a server serves within a target.
#pragma once

#include <functional>

#include "absl/status/statusor.h"

namespace treadle {

// Tries rates from `start` on: doubles or halves them until one is within the target and one is
// not, then halves the ratio between them until they are within 5 % of each other. At most 12
// doublings or halvings. `within`: whether the target is met at a rate. Returns the highest rate
// that was within; FailedPrecondition if none was, or if all were.
absl::StatusOr<double> FindHighestRate(
    double start, const std::function<absl::StatusOr<bool>(double rate)>& within);

}  // namespace treadle
