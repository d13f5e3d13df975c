// Sampling, step by step as kernels/sampling.h numbers it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/reference/reference_backend.h"

namespace treadle {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

float Finite(float x) {
  if (std::isnan(x)) return kMinusInfinity;
  return std::min(x, std::numeric_limits<float>::max());
}

// Steps 1 to 3 for the tokens from `first` on.
std::vector<float> Adjust(std::span<const float> logits, int32_t first, const SampleRow& row) {
  const SamplingParameters& parameters = *row.parameters;
  std::vector<float> x(logits.begin(), logits.end());
  const auto here = [&](int32_t token) {
    return token >= first && token - first < static_cast<int64_t>(x.size());
  };
  for (const LogitBias& entry : parameters.logit_bias) {
    if (here(entry.token)) x[entry.token - first] += entry.bias;
  }
  for (const TokenCount& count : row.counts) {
    if (!here(count.token)) continue;
    float& value = x[count.token - first];
    value =
        value > 0 ? value / parameters.repetition_penalty : value * parameters.repetition_penalty;
    if (count.in_output == 0) continue;
    value -= parameters.presence_penalty;
    value -= parameters.frequency_penalty * static_cast<float>(count.in_output);
  }
  for (int32_t token : row.suppressed) {
    if (here(token)) x[token - first] = kMinusInfinity;
  }
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t token = first + i;
    const bool allowed = row.mask == nullptr || (row.mask[token / 32] >> (token % 32)) & 1;
    x[i] = allowed ? Finite(x[i]) : kMinusInfinity;
  }
  return x;
}

// All ids, best first; ties: lowest id first.
std::vector<int32_t> Order(std::span<const float> x) {
  std::vector<int32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
  return order;
}

int32_t Draw(std::span<const float> logits, const SampleRow& row) {
  const SamplingParameters& parameters = *row.parameters;
  const std::vector<float> x = Adjust(logits, 0, row);
  std::vector<int32_t> order = Order(x);
  const float best = x[order.front()];
  if (best == kMinusInfinity) return 0;
  if (parameters.temperature == 0) return order.front();

  std::vector<double> weight;  // in order; parallel to `order`
  for (int32_t token : order) {
    weight.push_back(std::exp((double{x[token]} - best) / parameters.temperature));
  }
  if (parameters.top_k > 0 && static_cast<size_t>(parameters.top_k) < weight.size()) {
    weight.resize(static_cast<size_t>(parameters.top_k));
  }
  if (parameters.top_p < 1) {
    const double total = std::accumulate(weight.begin(), weight.end(), 0.0);
    double cumulative = 0;
    size_t keep = 0;
    while (keep < weight.size() && (keep == 0 || cumulative < parameters.top_p * total)) {
      cumulative += weight[keep++];
    }
    weight.resize(keep);
  }
  while (weight.back() < parameters.min_p || weight.back() == 0) weight.pop_back();

  const double u = CounterUniform(parameters.seed, row.candidate, row.position);
  const double target = u * std::accumulate(weight.begin(), weight.end(), 0.0);
  double cumulative = 0;
  for (size_t i = 0; i < weight.size(); ++i) {
    cumulative += weight[i];
    if (cumulative > target) return order[i];
  }
  return order[weight.size() - 1];
}

void AddLogprobs(std::span<const float> logits, const SampleRow& row, SampleResult& result) {
  std::vector<float> x(logits.begin(), logits.end());
  std::transform(x.begin(), x.end(), x.begin(), Finite);
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
  if (row.parameters != nullptr) result.token = Draw(logits, row);
  if (row.top_logprobs >= 0) AddLogprobs(logits, row, result);
  return result;
}

ShardSample ReferenceSampleShard(std::span<const float> logits, int32_t first_token,
                                 const SampleRow& row) {
  ShardSample shard;
  const auto size = static_cast<int64_t>(logits.size());
  std::vector<float> raw(logits.begin(), logits.end());
  std::transform(raw.begin(), raw.end(), raw.begin(), Finite);
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

}  // namespace treadle
