// Sample and SampleShard.
#include <algorithm>
#include <cmath>

#include "tests/kernels/op_tolerances.h"

namespace treadle {
namespace {

// In units of float's rounding: of logits, whose maximum and values are exact; a log probability is
// a difference of them and the logarithm of a sum of cols terms.
double Units(const OpRun& run, int64_t row) {
  double largest = 0;
  for (int64_t i = 0; i < run.op_case().cols; ++i) {
    const double size = std::fabs(run.tensor("logits").Row(row)[i]);
    if (size < 1e30) largest = std::max(largest, size);
  }
  const double sum = std::sqrt(static_cast<double>(run.op_case().cols)) / 4;
  return 16 + sum + 6 * largest;
}

}  // namespace

// Tokens exactly.
std::vector<float> SampleTolerance(const OpRun& run, const Arithmetic&) {
  const OpCase& c = run.op_case();
  std::vector<float> tolerance;
  for (int64_t row = 0; row < c.rows; ++row) {
    const float unit = static_cast<float>(kFloatUnit * Units(run, row));
    tolerance.insert(tolerance.end(), {0, unit, unit, 0});
    for (int32_t i = 0; i < kMaxTopLogprobs; ++i) tolerance.insert(tolerance.end(), {0, unit});
  }
  return tolerance;
}

// All is exact but the sum, of which each term has its own rounding and that of its exponent.
std::vector<float> ShardTolerance(const OpRun& run, const Arithmetic&) {
  const OpCase& c = run.op_case();
  std::vector<float> tolerance;
  for (int64_t row = 0; row < c.rows; ++row) {
    const ShardSample& shard = run.shards[row];
    tolerance.push_back(static_cast<float>(kFloatUnit * shard.sum * Units(run, row)));
    tolerance.resize(tolerance.size() + 4 + 2 * shard.num_top + 3 * shard.num_candidates);
  }
  return tolerance;
}

}  // namespace treadle
