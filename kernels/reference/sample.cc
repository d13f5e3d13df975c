// Sampling, step by step as kernels/sampling.h numbers it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/reference/reference_backend.h"

namespace treadle {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Steps 1 to 3 for the tokens from `first` on.
std::vector<float> Adjust(std::span<const float> logits, int32_t first, const SampleRow& row) {
  std::vector<float> x(logits.begin(), logits.end());
  ChangeLogits(row, first, x);
  std::ranges::transform(x, x.begin(), CleanLogit);
  return x;
}

// All ids, best first; ties: lowest id first.
std::vector<int32_t> Order(std::span<const float> x) {
  std::vector<int32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
  return order;
}

int32_t SampleToken(std::span<const float> logits, const SampleRow& row) {
  const std::vector<float> x = Adjust(logits, 0, row);
  const std::vector<int32_t> order = Order(x);
  if (x[order.front()] == kMinusInfinity) return 0;
  if (row.parameters->temperature == 0) return order.front();
  std::vector<float> descending;
  for (const int32_t token : order) descending.push_back(x[token]);
  SortedCandidates candidates(descending, row.parameters->temperature);
  return order[Draw(row, candidates)];
}

void AddLogprobs(std::span<const float> logits, const SampleRow& row, SampleResult& result) {
  std::vector<float> x(logits.begin(), logits.end());
  std::ranges::transform(x, x.begin(), CleanLogit);
  const std::vector<int32_t> order = Order(x);
  const double best = x[order.front()];
  double total = 0;
  for (float value : x) total += value == kMinusInfinity ? 0 : std::exp(value - best);
  const auto logprob = [&](int32_t token) {
    return x[token] == kMinusInfinity ? kMinusInfinity
                                      : static_cast<float>(x[token] - best - std::log(total));
  };
  if (result.token >= 0) result.logprob = logprob(result.token);
  if (row.target >= 0) result.target_logprob = logprob(row.target);
  result.num_top = std::min(row.top_logprobs, static_cast<int32_t>(x.size()));
  for (int32_t i = 0; i < result.num_top; ++i) result.top[i] = {order[i], logprob(order[i])};
}

}  // namespace

SampleResult ReferenceSample(std::span<const float> logits, const SampleRow& row) {
  SampleResult result;
  if (row.parameters != nullptr) result.token = SampleToken(logits, row);
  if (row.top_logprobs >= 0) AddLogprobs(logits, row, result);
  return result;
}

ShardSample ReferenceSampleShard(std::span<const float> logits, int32_t first_token,
                                 const SampleRow& row) {
  ShardSample shard;
  const auto size = static_cast<int64_t>(logits.size());
  std::vector<float> raw(logits.begin(), logits.end());
  std::ranges::transform(raw, raw.begin(), CleanLogit);
  if (row.top_logprobs >= 0) {
    const std::vector<int32_t> order = Order(raw);
    shard.max = raw[order.front()];
    double sum = 0;
    for (float x : raw) sum += x == kMinusInfinity ? 0 : std::exp(double{x} - shard.max);
    shard.sum = static_cast<float>(sum);
    const int64_t target = int64_t{row.target} - first_token;
    const bool here = row.target >= 0 && target >= 0 && target < size;
    shard.target_logit = here ? raw[target] : kMinusInfinity;
    shard.num_top = static_cast<int32_t>(std::min<int64_t>(row.top_logprobs, size));
    for (int32_t i = 0; i < shard.num_top; ++i) {
      shard.top[i] = {first_token + order[i], raw[order[i]]};
    }
  }
  shard.num_candidates = NumShardCandidates(row, size);
  if (shard.num_candidates == 0) return shard;
  const std::vector<float> x = Adjust(logits, first_token, row);
  const std::vector<int32_t> order = Order(x);
  for (int32_t i = 0; i < shard.num_candidates; ++i) {
    shard.candidates[i] = {first_token + order[i], x[order[i]], raw[order[i]]};
  }
  return shard;
}

void ReferenceBackend::Sample(Tensor logits, std::span<const SampleRow> rows,
                              std::span<SampleResult> results) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const float* row = logits.Row<float>(static_cast<int64_t>(i));
    results[i] = ReferenceSample({row, static_cast<size_t>(logits.cols)}, rows[i]);
  }
  KeepSamples(rows, results);
}

void ReferenceBackend::SampleShard(Tensor logits, int32_t first_token,
                                   std::span<const SampleRow> rows, std::span<ShardSample> shards) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const float* row = logits.Row<float>(static_cast<int64_t>(i));
    shards[i] = ReferenceSampleShard({row, static_cast<size_t>(logits.cols)}, first_token, rows[i]);
  }
}

}  // namespace treadle
