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

// Steps 1 to 3.
std::vector<float> Adjust(std::span<const float> logits, const SampleRow& row) {
  const SamplingParameters& parameters = *row.parameters;
  std::vector<float> x(logits.begin(), logits.end());
  for (const LogitBias& entry : parameters.logit_bias) x[entry.token] += entry.bias;
  for (const TokenCount& count : row.counts) {
    float& value = x[count.token];
    value =
        value > 0 ? value / parameters.repetition_penalty : value * parameters.repetition_penalty;
    if (count.in_output == 0) continue;
    value -= parameters.presence_penalty;
    value -= parameters.frequency_penalty * static_cast<float>(count.in_output);
  }
  for (int32_t token : row.suppressed) x[token] = kMinusInfinity;
  for (size_t token = 0; token < x.size(); ++token) {
    const bool allowed = row.mask == nullptr || (row.mask[token / 32] >> (token % 32)) & 1;
    x[token] = allowed ? Finite(x[token]) : kMinusInfinity;
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
  const std::vector<float> x = Adjust(logits, row);
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

}  // namespace treadle
