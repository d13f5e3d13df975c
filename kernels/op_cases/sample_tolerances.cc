// Sample and SampleShard.
#include <algorithm>
#include <cmath>

#include "kernels/op_cases/tolerant_reference.h"

namespace treadle {
namespace {

// A log probability's error in units of float's rounding, for each row: of logits, whose maximum
// and values are exact, it is a difference of them and the logarithm of a sum of cols terms.
std::vector<double> UnitsOf(Tensor logits) {
  std::vector<double> units;
  for (int64_t row = 0; row < logits.rows; ++row) {
    double largest = 0;
    for (int64_t i = 0; i < logits.cols; ++i) {
      const double size = std::fabs(logits.Row<float>(row)[i]);
      if (size < 1e30) largest = std::max(largest, size);
    }
    units.push_back(16 + std::sqrt(static_cast<double>(logits.cols)) / 4 + 6 * largest);
  }
  return units;
}

}  // namespace

std::vector<float> FieldsOf(const SampleResult& result) {
  std::vector<float> fields = {static_cast<float>(result.token), result.logprob,
                               result.target_logprob, static_cast<float>(result.num_top)};
  for (int32_t i = 0; i < kMaxTopLogprobs; ++i) {
    const bool set = i < result.num_top;
    fields.push_back(set ? static_cast<float>(result.top[i].token) : -1);
    fields.push_back(set ? result.top[i].logprob : 0);
  }
  return fields;
}

std::vector<float> FieldsOf(const ShardSample& shard) {
  std::vector<float> fields = {shard.sum, shard.max, shard.target_logit,
                               static_cast<float>(shard.num_top),
                               static_cast<float>(shard.num_candidates)};
  for (int32_t i = 0; i < shard.num_top; ++i) {
    fields.push_back(static_cast<float>(shard.top[i].token));
    fields.push_back(shard.top[i].logprob);
  }
  for (int32_t i = 0; i < shard.num_candidates; ++i) {
    const ShardCandidate& candidate = shard.candidates[i];
    fields.insert(fields.end(),
                  {static_cast<float>(candidate.token), candidate.x, candidate.logit});
  }
  return fields;
}

// Tokens exactly.
void TolerantReference::Sample(Tensor logits, std::span<const SampleRow> rows,
                               std::span<SampleResult> results) {
  Begin();
  for (const double units : UnitsOf(logits)) {
    const float unit = static_cast<float>(kFloatUnit * units);
    tolerances_.fields.insert(tolerances_.fields.end(), {0, unit, unit, 0});
    for (int32_t i = 0; i < kMaxTopLogprobs; ++i) {
      tolerances_.fields.insert(tolerances_.fields.end(), {0, unit});
    }
  }
  below().Sample(logits, rows, results);
}

// All is exact but the sum, of which each term has its own rounding and that of its exponent.
void TolerantReference::SampleShard(Tensor logits, int32_t first_token,
                                    std::span<const SampleRow> rows,
                                    std::span<ShardSample> shards) {
  const std::vector<double> units = UnitsOf(logits);
  below().SampleShard(logits, first_token, rows, shards);
  Begin();
  for (size_t row = 0; row < shards.size(); ++row) {
    const size_t first = tolerances_.fields.size();
    tolerances_.fields.resize(first + FieldsOf(shards[row]).size());
    tolerances_.fields[first] = static_cast<float>(kFloatUnit * shards[row].sum * units[row]);
  }
}

}  // namespace treadle
