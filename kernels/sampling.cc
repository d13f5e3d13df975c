#include "kernels/sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <type_traits>

#include "base/status.h"

namespace treadle {
namespace {

static_assert(std::is_trivially_copyable_v<ShardSample>);

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

}  // namespace

bool SamplingField::Allows(double value) const {
  return std::isfinite(value) && value <= high && (low_open ? value > low : value >= low);
}

void ChangeLogits(const SampleRow& row, int32_t first, std::span<float> x) {
  const SamplingParameters& p = *row.parameters;
  const auto tokens = std::ssize(x);
  const auto here = [&](int32_t token) { return token >= first && token - first < tokens; };
  for (const LogitBias& entry : p.logit_bias) {
    if (here(entry.token)) x[entry.token - first] += entry.bias;
  }
  for (const TokenCount& count : row.counts) {
    if (!here(count.token)) continue;
    float& value = x[count.token - first];
    value = value > 0 ? value / p.repetition_penalty : value * p.repetition_penalty;
    if (count.in_output == 0) continue;
    value -= p.presence_penalty;
    value -= p.frequency_penalty * static_cast<float>(count.in_output);
  }
  for (const int32_t token : row.suppressed) {
    if (here(token)) x[token - first] = kMinusInfinity;
  }
  if (row.mask == nullptr) return;
  for (int64_t token = first; token < first + tokens;) {
    const int64_t next = std::min(first + tokens, token / 32 * 32 + 32);
    const uint32_t before = (1u << (token % 32)) - 1;  // in its word, of another part
    const uint32_t behind = next % 32 == 0 ? 0 : ~0u << (next % 32);
    uint32_t denied = ~(row.mask[token / 32] | before | behind);
    if (denied == ~0u) {
      std::fill_n(x.begin() + (token - first), 32, kMinusInfinity);
    } else {
      for (; denied != 0; denied &= denied - 1) {
        x[token / 32 * 32 + std::countr_zero(denied) - first] = kMinusInfinity;
      }
    }
    token = next;
  }
}

SortedCandidates::SortedCandidates(std::span<const float> x, float temperature) {
  weights_.reserve(x.size());
  for (const float each : x) weights_.push_back(std::exp((double{each} - x[0]) / temperature));
}

void SortedCandidates::KeepTop(int64_t count) {
  if (count < std::ssize(weights_)) weights_.resize(static_cast<size_t>(count));
}

void SortedCandidates::KeepMass(double mass) {
  double cumulative = 0;
  size_t keep = 0;
  while (keep < weights_.size() && (keep == 0 || cumulative < mass)) cumulative += weights_[keep++];
  weights_.resize(keep);
}

void SortedCandidates::KeepWeights(float least) {
  while (weights_.back() < least) weights_.pop_back();
}

double SortedCandidates::weight() const {
  return std::accumulate(weights_.begin(), weights_.end(), 0.0);
}

size_t SortedCandidates::Find(double target) const {
  double cumulative = 0;
  size_t last = 0;
  for (size_t i = 0; i < weights_.size() && weights_[i] > 0; ++i) {
    cumulative += weights_[last = i];
    if (cumulative > target) break;
  }
  return last;
}

bool CanMergeShards(const SampleRow& row) {
  const SamplingParameters* p = row.parameters;
  return p == nullptr || p->temperature == 0 || (p->top_k > 0 && p->top_k <= kMaxShardCandidates);
}

int32_t NumShardCandidates(const SampleRow& row, int64_t tokens) {
  if (row.parameters == nullptr || !CanMergeShards(row)) return 0;
  const int32_t wanted = row.parameters->temperature == 0 ? 1 : row.parameters->top_k;
  return static_cast<int32_t>(std::min<int64_t>(wanted, tokens));
}

SampleResult MergeShards(const SampleRow& row, std::span<const ShardSample> shards) {
  TREADLE_CHECK(CanMergeShards(row) && !shards.empty());
  SampleResult result;
  float logit = kMinusInfinity;  // of result.token, raw
  if (row.parameters != nullptr) {
    std::vector<ShardCandidate> order;
    for (const ShardSample& shard : shards) {
      order.insert(order.end(), shard.candidates.begin(),
                   shard.candidates.begin() + shard.num_candidates);
    }
    // Stable: equal candidates stay in the shards' order, which is that of their tokens.
    std::ranges::stable_sort(order, std::greater(), &ShardCandidate::x);
    size_t chosen = 0;
    if (row.parameters->temperature != 0 && order[0].x != kMinusInfinity) {
      std::vector<float> x(order.size());
      std::ranges::transform(order, x.begin(), &ShardCandidate::x);
      SortedCandidates candidates(x, row.parameters->temperature);
      chosen = Draw(row, candidates);
    }
    result.token = order[chosen].token;
    logit = order[chosen].logit;
  }
  if (row.top_logprobs < 0) return result;

  float max = kMinusInfinity;
  for (const ShardSample& shard : shards) max = std::max(max, shard.max);
  double sum = 0;
  float target = kMinusInfinity;
  std::vector<TokenLogprob> top;
  for (const ShardSample& shard : shards) {
    if (shard.max != kMinusInfinity) sum += shard.sum * std::exp(double{shard.max} - max);
    target = std::max(target, shard.target_logit);
    top.insert(top.end(), shard.top.begin(), shard.top.begin() + shard.num_top);
  }
  const auto logprob = [&](float x) {
    return x == kMinusInfinity ? x : static_cast<float>(double{x} - max - std::log(sum));
  };
  std::ranges::stable_sort(top, std::greater(), &TokenLogprob::logprob);
  if (result.token >= 0) result.logprob = logprob(logit);
  if (row.target >= 0) result.target_logprob = logprob(target);
  result.num_top = std::min(row.top_logprobs, static_cast<int32_t>(top.size()));
  for (int32_t i = 0; i < result.num_top; ++i) {
    result.top[i] = {top[i].token, logprob(top[i].logprob)};
  }
  return result;
}

}  // namespace treadle
