#include "kernels/sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>

#include "base/status.h"

namespace treadle {
namespace {

static_assert(std::is_trivially_copyable_v<ShardSample>);

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Steps 5 to 8 over candidates in the order of step 4, the best of which is not -inf.
int32_t Draw(std::span<const ShardCandidate> order, const SampleRow& row) {
  const SamplingParameters& p = *row.parameters;
  std::array<double, kMaxShardCandidates> weights;
  size_t count = std::min(order.size(), static_cast<size_t>(p.top_k));
  const auto sum = [&] {
    double total = 0;
    for (size_t i = 0; i < count; ++i) total += weights[i];
    return total;
  };
  for (size_t i = 0; i < count; ++i) {
    weights[i] = std::exp((double{order[i].x} - order[0].x) / p.temperature);
  }
  if (p.top_p < 1) {
    const double enough = p.top_p * sum();
    double cumulative = 0;
    size_t keep = 0;
    while (keep < count && (keep == 0 || cumulative < enough)) cumulative += weights[keep++];
    count = keep;
  }
  while (weights[count - 1] < p.min_p || weights[count - 1] == 0) --count;
  const double target = CounterUniform(p.seed, row.candidate, row.position) * sum();
  double cumulative = 0;
  size_t at = 0;
  while (at + 1 < count && (cumulative += weights[at]) <= target) ++at;
  return static_cast<int32_t>(at);
}

}  // namespace

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
    const bool first = row.parameters->temperature == 0 || order[0].x == kMinusInfinity;
    const ShardCandidate& chosen = order[first ? 0 : Draw(order, row)];
    result.token = chosen.token;
    logit = chosen.logit;
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

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9;  // the golden ratio
    key[1] += 0xBB67AE85;  // sqrt(3) - 1
  }
  return counter;
}

double CounterUniform(uint64_t seed, uint32_t candidate, int64_t position) {
  const uint64_t at = static_cast<uint64_t>(position);
  const auto out =
      Philox4x32({static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32), candidate, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = (uint64_t{out[1]} << 32) | out[0];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace treadle
