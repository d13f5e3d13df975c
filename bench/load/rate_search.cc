#include "bench/load/rate_search.h"

#include <cmath>

#include "base/status.h"

namespace treadle {

absl::StatusOr<double> FindHighestRate(
    double start, const std::function<absl::StatusOr<bool>(double rate)>& within) {
  constexpr int kSteps = 12;
  constexpr double kNear = 1.05;
  TREADLE_ASSIGN_OR_RETURN(const bool good, within(start));
  double low = start, high = start;
  bool found = false;
  for (int i = 0; i < kSteps && !found; ++i) {
    double& next = good ? high : low;
    next *= good ? 2 : 0.5;
    TREADLE_ASSIGN_OR_RETURN(const bool next_good, within(next));
    found = next_good != good;
    if (!found) (good ? low : high) = next;
  }
  if (!found) {
    return absl::FailedPreconditionError(
        Str(good ? "every rate up to " : "no rate down to ", good ? high : low,
            " requests/s is within --goodput: expected a target that the server ",
            good ? "misses at some rate" : "meets at some rate"));
  }
  while (high / low > kNear) {
    const double middle = std::sqrt(low * high);
    TREADLE_ASSIGN_OR_RETURN(const bool middle_good, within(middle));
    (middle_good ? low : high) = middle;
  }
  return low;
}

}  // namespace treadle
