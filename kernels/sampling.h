// Sampling as a pure function of a row of logits and a SampleRow.
//
// The order of operations, exactly (every backend gives the reference's token unless the draw or a
// top-p or min-p threshold falls within rounding of a boundary):
//   1. x = logits + logit_bias (float; entries in order, a token may occur twice).
//   2. For each token of `counts`: x = x > 0 ? x / repetition_penalty : x * repetition_penalty;
//      then, if in_output > 0: x = x - presence_penalty, x = x - frequency_penalty * in_output
//      (every step rounded to float).
//   3. x = -inf for suppressed tokens and for those whose mask bit (token % 32 of word token / 32)
//      is 0. NaN counts as -inf, +inf as the largest finite float. If every x is -inf, the result
//      is token 0.
//   4. Candidates are ordered by x, descending; ties: lowest id first. Temperature 0: the first is
//      the result. Else each has the weight w = exp((x - x_first) / temperature); w_first = 1.
//   5. top_k (if > 0) keeps the first top_k of that order.
//   6. top_p (if < 1), on probabilities renormalized over what top-k kept: keeps the smallest
//      prefix whose cumulative probability is >= top_p; always at least one.
//   7. min_p (if > 0) keeps those with w >= min_p, that is, relative to the best probability after
//      temperature (the same before and after renormalization).
//   8. With u = CounterUniform(seed, candidate, position) and W = the sum of the kept weights: the
//      first candidate, in order, whose cumulative weight exceeds u * W (if rounding leaves none:
//      the last kept one of positive weight). A candidate of weight 0 is never drawn.
// Log probabilities are of the raw logits (before all of that, but for NaN and +inf as in 3):
// x - max - log(sum of exp(x - max)); a logit of -inf gives -inf. The alternatives `top` are the
// first min(top_logprobs, vocab) by raw logit, ties: lowest id first. With top_logprobs = -1 all
// log-probability fields stay 0 and num_top is 0; without parameters token is -1.
//
// The random number is counter-based, keyed by (seed, candidate, position), so a token depends on
// nothing but its own request (N4).
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

namespace treadle {

inline constexpr int32_t kMaxTopLogprobs = 20;

struct LogitBias {
  int32_t token = 0;
  float bias = 0;
};

// One request's wishes, constant over its life. Validated where it enters (server), so every
// backend may assume: finite values, temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1,
// repetition_penalty > 0, token ids in the vocabulary.
struct SamplingParameters {
  float temperature = 1.0f;  // 0: greedy (the lowest id wins a tie)
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  std::vector<LogitBias> logit_bias = {};
  uint64_t seed = 0;  // resolved: drawn at the door when the client gave none

  bool NeedsCounts() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
};

// The parameters that are one number each, for all who read, check, send or offer them. Every wire
// has a field of this name.
struct SamplingField {
  std::string_view name;
  std::variant<float SamplingParameters::*, int32_t SamplingParameters::*> member;
  // The numbers that a client may wish: finite ones of [low, high], or of (low, high].
  double low;
  bool low_open;
  double high;
  std::string_view expected;  // the same in words
  std::string_view help;      // of a flag

  bool Allows(double value) const;  // false for NaN and infinities
};
inline constexpr double kUnlimited = std::numeric_limits<double>::infinity();
inline constexpr SamplingField kSamplingFields[] = {
    {"temperature", &SamplingParameters::temperature, 0, false, kUnlimited, "a finite number >= 0",
     "0: greedy"},
    {"top_k", &SamplingParameters::top_k, 1, false, kUnlimited, "at least 1",
     "sample from the k best tokens"},
    {"top_p", &SamplingParameters::top_p, 0, true, 1, "(0, 1]",
     "sample from the best tokens of this total probability"},
    {"min_p", &SamplingParameters::min_p, 0, false, 1, "[0, 1]",
     "drop tokens below this share of the best one's probability"},
    {"repetition_penalty", &SamplingParameters::repetition_penalty, 0, true, kUnlimited,
     "a finite number > 0", "1: none"},
    {"presence_penalty", &SamplingParameters::presence_penalty, -2, false, 2, "[-2, 2]", "-2 to 2"},
    {"frequency_penalty", &SamplingParameters::frequency_penalty, -2, false, 2, "[-2, 2]",
     "-2 to 2"},
};

// How often a token occurred so far; at least one of the two is positive.
struct TokenCount {
  int32_t token = 0;
  int32_t in_prompt = 0;
  int32_t in_output = 0;
};

// The questions to one row of logits.
struct SampleRow {
  const SamplingParameters* parameters = nullptr;  // null: no sample, log probabilities only
  std::span<const TokenCount> counts = {};         // empty unless parameters->NeedsCounts()
  std::span<const int32_t> suppressed = {};  // never sampled (end tokens before min_new_tokens)
  const uint32_t* mask = nullptr;            // [ceil(vocab / 32)] bits, 1 = allowed; null: all
  uint32_t candidate = 0;
  int64_t position = 0;       // position that the sampled token will have
  int32_t top_logprobs = -1;  // -1: no log probabilities; else that many alternatives (<= 20)
  int32_t target = -1;        // with top_logprobs >= 0: its log probability is wanted; -1: none
};

struct TokenLogprob {
  int32_t token = -1;
  float logprob = 0;
};

struct SampleResult {
  int32_t token = -1;        // -1 when nothing was to be sampled
  float logprob = 0;         // of `token`, raw
  float target_logprob = 0;  // of SampleRow::target, raw
  int32_t num_top = 0;
  std::array<TokenLogprob, kMaxTopLogprobs> top;  // best first; ties: lowest id first
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): ten rounds
// on a counter of four words.
constexpr std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter,
                                             std::array<uint32_t, 2> key) {
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

// With key = seed (low word first) and counter = (position low, position high, candidate, 0): the
// upper 53 bits of output words 1:0; the others are 0.
constexpr uint64_t CounterBits(uint64_t seed, uint32_t candidate, int64_t position) {
  const auto at = static_cast<uint64_t>(position);
  const auto out =
      Philox4x32({static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32), candidate, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return ((uint64_t{out[1]} << 32) | out[0]) & ~uint64_t{0x7ff};
}
// Uniform in [0, 1), 53 bits.
constexpr double CounterUniform(uint64_t seed, uint32_t candidate, int64_t position) {
  return static_cast<double>(CounterBits(seed, candidate, position)) * 0x1p-64;
}

// -- the steps, for backends whose device is the host --------------------------------------------
// NaN counts as -inf, +inf as the largest finite float.
constexpr float CleanLogit(float logit) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  if (logit != logit) return -std::numeric_limits<float>::infinity();
  return logit < kLargest ? logit : kLargest;
}

// Steps 1 to 3, but for CleanLogit, in place. x: logits of the tokens from `first` on; the row's
// token ids are of the whole vocabulary. Requires row.parameters.
void ChangeLogits(const SampleRow& row, int32_t first, std::span<float> x);

// Steps 5 to 8, over candidates in the order of step 4 with their weights, the best of which is not
// -inf. Candidates has
//   KeepTop(n):      keeps the first n;
//   KeepMass(w):     keeps the smallest prefix of at least this weight, and at least one;
//   KeepWeights(w):  keeps those of at least this weight;
//   weight():        is the sum of the weights that are kept;
//   Find(w):         is the first candidate whose cumulative weight exceeds w, else the last kept
//                    one of positive weight.
template <typename Candidates>
auto Draw(const SampleRow& row, Candidates& candidates) {
  const SamplingParameters& p = *row.parameters;
  if (p.top_k > 0) candidates.KeepTop(p.top_k);
  if (p.top_p < 1) candidates.KeepMass(double{p.top_p} * candidates.weight());
  if (p.min_p > 0) candidates.KeepWeights(p.min_p);
  const double u = CounterUniform(p.seed, row.candidate, row.position);
  return candidates.Find(u * candidates.weight());
}

// Draw's candidates where all of them are there in order.
class SortedCandidates {
 public:
  // x: after steps 1 to 3, descending.
  SortedCandidates(std::span<const float> x, float temperature);

  void KeepTop(int64_t count);
  void KeepMass(double mass);
  void KeepWeights(float least);
  double weight() const;
  size_t Find(double target) const;  // an index into x

 private:
  std::vector<double> weights_;  // of those that are kept, in order
};

// -- vocabulary shards ----------------------------------------------------------------------------
// With a vocabulary that is split over ranks, a rank describes its part of a row in a ShardSample,
// and MergeShards makes the result of them all, so that full rows need not be gathered: exactly
// the token that sampling the full row gives (log probabilities differ by rounding of the sum).
// Rows whose candidates are not among the first kMaxShardCandidates of each shard (a temperature,
// and top_k 0 or larger) are sampled from gathered rows instead.
inline constexpr int32_t kMaxShardCandidates = 64;

struct ShardCandidate {
  int32_t token = -1;  // in the whole vocabulary
  float x = 0;         // after steps 1 to 3
  float logit = 0;     // raw
};

// Trivially copyable: it travels by AllGather.
struct ShardSample {
  float max = 0;           // of the raw logits
  float sum = 0;           // of exp(raw - max)
  float target_logit = 0;  // raw, of SampleRow::target; -inf if it is in another shard
  int32_t num_top = 0;
  int32_t num_candidates = 0;
  // As in SampleResult, but `logprob` is the raw logit.
  std::array<TokenLogprob, kMaxTopLogprobs> top;
  std::array<ShardCandidate, kMaxShardCandidates> candidates;  // in the order of step 4
};

// True if MergeShards can serve the row.
bool CanMergeShards(const SampleRow& row);
// How many candidates of a row a shard of `tokens` tokens brings: none if nothing is sampled or the
// row cannot be merged.
int32_t NumShardCandidates(const SampleRow& row, int64_t tokens);
// `shards` of one row, in rank order (ascending tokens). Requires CanMergeShards(row).
SampleResult MergeShards(const SampleRow& row, std::span<const ShardSample> shards);

}  // namespace treadle
