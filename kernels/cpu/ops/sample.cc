// Sampling as kernels/sampling.h defines it, without sorting the vocabulary.
//
// Candidates are taken in bands of descending logit, and only as many bands as a decision needs. In
// what was taken, top-k, top-p and the draw each look for one place in the descending order; that
// is a selection (nth_element on halves), not a sort.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/cpu/ops/ops_state.h"
#include "kernels/cpu/ops/sample_kernels.h"
#include "kernels/sampling.h"

namespace treadle {
namespace {

// Fixed parts of a row, whoever computes them, so that bits do not depend on the threads.
constexpr int64_t kMaxChunk = 4096;
constexpr int64_t kSumChunk = 1024;
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// A band ends where weights fall below exp(-edge); `weight` is that, widened for rounding.
// exp(-105) is 0 in float.
struct Band {
  float edge;
  float weight;
};
constexpr Band kBands[] = {{3.0f, 0.04989f},    {5.0f, 0.006751f},   {7.0f, 0.0009137f},
                           {9.0f, 0.0001237f},  {11.0f, 1.674e-05f}, {13.0f, 2.265e-06f},
                           {16.0f, 1.128e-07f}, {20.0f, 2.065e-09f}, {26.0f, 5.119e-12f},
                           {40.0f, 4.257e-18f}, {105.0f, 0.0f}};

bool Before(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// Natural logarithm of a normal positive number to within 2 ulp, without libm: x = m 2^e with m in
// [sqrt(1/2), sqrt(2)), log(m) = 2 atanh((m - 1) / (m + 1)) by its series.
double Log(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  const double t = (m - 1.0) / (m + 1.0);
  double series = 0.0;
  for (int power = 21; power >= 1; power -= 2) series = series * (t * t) + 1.0 / power;
  return static_cast<double>(exponent) * 0.6931471805599453 + 2.0 * t * series;
}

// A row of logits and the passes over it; over the pool if there is one.
class LogitRow {
 public:
  LogitRow(CpuIsa isa, ThreadPool* pool, float* logits, int64_t vocab, SampleScratch& scratch)
      : isa_(isa), pool_(pool), logits_(logits), vocab_(vocab), scratch_(scratch) {}

  float* logits() const { return logits_; }
  std::span<float> all() const { return {logits_, static_cast<size_t>(vocab_)}; }
  int64_t vocab() const { return vocab_; }
  CpuIsa isa() const { return isa_; }
  SampleScratch& scratch() const { return scratch_; }

  float Max() const {
    ForEachChunk(kMaxChunk, scratch_.chunk_max, [this](int64_t begin, int64_t count) {
      return kMaxLogit[isa_](logits_ + begin, count);
    });
    return *std::max_element(scratch_.chunk_max.begin(), scratch_.chunk_max.end());
  }

  // Lowest token that has the value that Max() just returned; 0 where that is -inf.
  int32_t FirstOf(float max) const {
    if (max == -kInfinity) return 0;
    const auto chunk = std::find(scratch_.chunk_max.begin(), scratch_.chunk_max.end(), max);
    const int64_t begin = (chunk - scratch_.chunk_max.begin()) * kMaxChunk;
    return static_cast<int32_t>(kFirstAtLeast[isa_](logits_, begin, vocab_, max));
  }

  // Sum of exp((x - max) * factor), chunks ascending.
  double SumExp(float max, float factor) const {
    ForEachChunk(kSumChunk, scratch_.chunk_sum, [&](int64_t begin, int64_t count) {
      return kSumExp[isa_](logits_ + begin, count, max, factor);
    });
    double sum = 0.0;
    for (const float part : scratch_.chunk_sum) sum += part;
    return sum;
  }

 private:
  template <typename Body>
  void ForEachChunk(int64_t size, std::vector<float>& results, Body body) const {
    const int64_t chunks = (vocab_ + size - 1) / size;
    results.resize(chunks);
    const auto run = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        results[i] = body(i * size, std::min(size, vocab_ - i * size));
      }
    };
    if (pool_ == nullptr) {
      run(0, chunks);
    } else {
      pool_->ParallelFor(chunks, 1, run);
    }
  }

  const CpuIsa isa_;
  ThreadPool* const pool_;
  float* const logits_;  // [vocab]
  const int64_t vocab_;
  SampleScratch& scratch_;
};

// Draw's candidates, in descending order band by band: a prefix of that order is in `taken`, of
// which whole bands are in order, but not the tokens in a band.
class Candidates {
 public:
  Candidates(const LogitRow& row, float max, float temperature)
      : row_(row),
        max_(max),
        temperature_(temperature),
        factor_(std::min(1.0f / temperature, kLargest)),
        taken_(row.scratch().candidates) {
    taken_.clear();
  }

  // The weight of all candidates that are kept, of which only a part may be taken.
  double weight() {
    if (weight_ == 0.0) weight_ = row_.SumExp(max_, factor_);
    return weight_;
  }

  void KeepTop(int64_t count) {
    if (count >= row_.vocab()) return;
    while (static_cast<int64_t>(taken_.size()) < count && TakeBand()) {
    }
    if (static_cast<int64_t>(taken_.size()) > count) {
      std::nth_element(taken_.begin(), taken_.begin() + count, taken_.end(), Before);
      Truncate(count);
    }
    Close();
  }

  void KeepMass(double target) {
    Truncate(Locate([target](double cumulative) { return cumulative >= target; }) + 1);
    Close();
  }

  void KeepWeights(float least) {
    while (floor_weight_ >= least && TakeBand()) {
    }
    std::erase_if(taken_, [least](const Candidate& c) { return c.weight < least; });
    Close();
  }

  int32_t Find(double target) {
    return taken_[Locate([target](double cumulative) { return cumulative > target; })].token;
  }

 private:
  // Appends the next band; false if there is none.
  bool TakeBand() {
    if (next_band_ == std::size(kBands)) return false;
    const Band& band = kBands[next_band_++];
    const float floor = std::max(max_ - band.edge * temperature_, -kLargest);
    SampleScratch& scratch = row_.scratch();
    scratch.ids.resize(row_.vocab() + 16);
    scratch.weights.resize(row_.vocab() + 16);
    const int64_t count =
        kGatherBand[row_.isa()](row_.logits(), row_.vocab(), floor, ceiling_, max_, factor_,
                                scratch.ids.data(), scratch.weights.data());
    for (int64_t i = 0; i < count; ++i) {
      const int32_t token = scratch.ids[i];
      const float weight = scratch.weights[i];
      if (weight > 0.0f) taken_.push_back({CleanLogit(row_.logits()[token]), token, weight});
    }
    ceiling_ = floor;
    floor_weight_ = band.weight;
    return true;
  }

  // Nothing beyond what is taken belongs to the candidates any more.
  void Close() {
    next_band_ = std::size(kBands);
    weight_ = Weight(0, taken_.size());
  }

  void Truncate(size_t count) { taken_.erase(taken_.begin() + count, taken_.end()); }

  double Weight(size_t begin, size_t end) const {
    double sum = 0.0;
    for (size_t i = begin; i < end; ++i) sum += taken_[i].weight;
    return sum;
  }

  // Index of the first candidate in order at which `reached(cumulative weight)`, after arranging
  // `taken` so that what precedes it in order precedes it there. If none: the last.
  template <typename Reached>
  size_t Locate(Reached reached) {
    double before = 0.0;  // weight of [0, begin)
    size_t begin = 0;
    size_t end = taken_.size();
    double band = Weight(begin, end);
    while (!reached(before + band)) {
      const size_t old_end = end;
      if (!TakeBand()) break;
      if (taken_.size() == old_end) continue;
      before += band;
      begin = old_end;
      end = taken_.size();
      band = Weight(begin, end);
    }
    while (end - begin > 32) {
      const size_t middle = begin + (end - begin) / 2;
      std::nth_element(taken_.begin() + begin, taken_.begin() + middle, taken_.begin() + end,
                       Before);
      const double left = Weight(begin, middle);
      if (reached(before + left)) {
        end = middle;
      } else {
        before += left;
        begin = middle;
      }
    }
    std::sort(taken_.begin() + begin, taken_.begin() + end, Before);
    for (; begin + 1 < end; ++begin) {
      before += taken_[begin].weight;
      if (reached(before)) break;
    }
    return begin;
  }

  const LogitRow& row_;
  const float max_;
  const float temperature_;
  const float factor_;
  std::vector<Candidate>& taken_;
  size_t next_band_ = 0;
  float ceiling_ = kInfinity;
  float floor_weight_ = 1.0f;  // what is not taken has less
  double weight_ = 0.0;        // 0: not known yet
};

bool ChangesLogits(const SampleRow& row) {
  return row.parameters != nullptr && (!row.parameters->logit_bias.empty() || !row.counts.empty() ||
                                       !row.suppressed.empty() || row.mask != nullptr);
}

int32_t SampleToken(const SampleRow& row, const LogitRow& logits) {
  const SamplingParameters& p = *row.parameters;
  const float max = logits.Max();
  if (max == -kInfinity || p.temperature == 0.0f) return logits.FirstOf(max);
  Candidates candidates(logits, max, p.temperature);
  return Draw(row, candidates);
}

// The first `count` tokens by logit (`logprob` holds it), ties by id, in order, to top; returns how
// many there are.
int32_t TopLogits(const LogitRow& row, int32_t count, TokenLogprob* top) {
  const auto size = static_cast<int32_t>(std::min<int64_t>(count, row.vocab()));
  if (size == 0) return 0;
  int32_t filled = 0;
  const auto insert = [&](int32_t token, float logit) {
    int32_t at = filled < size ? filled++ : size - 1;
    for (; at > 0 && top[at - 1].logprob < logit; --at) top[at] = top[at - 1];
    top[at] = {token, logit};
  };
  for (int32_t token = 0; token < size; ++token) insert(token, CleanLogit(row.logits()[token]));
  int64_t next = size;
  for (;;) {
    const float least = std::nextafter(top[size - 1].logprob, kInfinity);
    if (least == kInfinity) return size;
    next = kFirstAtLeast[row.isa()](row.logits(), next, row.vocab(), least);
    if (next < 0) return size;
    insert(static_cast<int32_t>(next), CleanLogit(row.logits()[next]));
    ++next;
  }
}

void SampleOne(const SampleRow& row, LogitRow& logits, SampleResult& result) {
  result = SampleResult();
  const bool logprobs = row.top_logprobs >= 0;
  const int64_t vocab = logits.vocab();
  const float* raw = logits.logits();
  float max = 0.0f;
  double log_sum = 0.0;
  if (logprobs) {
    max = logits.Max();
    if (max != -kInfinity) log_sum = Log(logits.SumExp(max, 1.0f));
    result.num_top = TopLogits(logits, row.top_logprobs, result.top.data());
    if (ChangesLogits(row)) {
      logits.scratch().raw.assign(raw, raw + vocab);
      raw = logits.scratch().raw.data();
    }
  }
  if (row.parameters != nullptr) {
    if (ChangesLogits(row)) ChangeLogits(row, 0, logits.all());
    result.token = SampleToken(row, logits);
  }
  if (!logprobs) return;
  const auto logprob = [&](float logit) {
    if (logit == -kInfinity) return -kInfinity;
    return static_cast<float>(static_cast<double>(logit) - max - log_sum);
  };
  for (int32_t i = 0; i < result.num_top; ++i) {
    result.top[i].logprob = logprob(result.top[i].logprob);
  }
  if (result.token >= 0) result.logprob = logprob(CleanLogit(raw[result.token]));
  if (row.target >= 0) result.target_logprob = logprob(CleanLogit(raw[row.target]));
}

// The part of SampleOne that a shard of the vocabulary, from token `first` on, can do alone.
void SampleShardOne(const SampleRow& row, int32_t first, LogitRow& logits, ShardSample& shard) {
  shard = ShardSample();
  const int64_t tokens = logits.vocab();
  const float* raw = logits.logits();
  if (row.top_logprobs >= 0) {
    shard.max = logits.Max();
    shard.sum = shard.max == -kInfinity ? 0.0f : static_cast<float>(logits.SumExp(shard.max, 1.0f));
    shard.num_top = TopLogits(logits, row.top_logprobs, shard.top.data());
    for (int32_t i = 0; i < shard.num_top; ++i) shard.top[i].token += first;
    const int64_t target = int64_t{row.target} - first;
    const bool here = row.target >= 0 && target >= 0 && target < tokens;
    shard.target_logit = here ? CleanLogit(raw[target]) : -kInfinity;
  }
  shard.num_candidates = NumShardCandidates(row, tokens);
  if (shard.num_candidates == 0) return;
  if (ChangesLogits(row)) {
    logits.scratch().raw.assign(raw, raw + tokens);
    raw = logits.scratch().raw.data();
    ChangeLogits(row, first, logits.all());
  }
  std::array<TokenLogprob, kMaxShardCandidates> best;
  if (shard.num_candidates == 1) {
    const float max = logits.Max();
    best[0] = {logits.FirstOf(max), max};
  } else {
    TopLogits(logits, shard.num_candidates, best.data());
  }
  for (int32_t i = 0; i < shard.num_candidates; ++i) {
    shard.candidates[i] = {first + best[i].token, best[i].logprob, CleanLogit(raw[best[i].token])};
  }
}

}  // namespace

// Runs one(LogitRow, row) for each row: rows over the pool, or a single long row's passes.
template <typename One>
void CpuOps::ForEachLogitRow(Tensor logits, One one) {
  TREADLE_CHECK(logits.dtype == DType::kF32 && logits.cols > 0);
  State& s = *state_;
  s.sample_scratch.resize(pool_.size());
  const auto run = [&](int64_t row, ThreadPool* pool, SampleScratch& scratch) {
    LogitRow logit_row(isa_, pool, logits.Row<float>(row), logits.cols, scratch);
    one(logit_row, row);
  };
  if (logits.rows == 1) {
    run(0, logits.cols >= 4 * kMaxChunk ? &pool_ : nullptr, s.sample_scratch[0]);
    return;
  }
  pool_.ParallelForEach(logits.rows, [&](int worker, int64_t row, int64_t) {
    run(row, nullptr, s.sample_scratch[worker]);
  });
}

void CpuOps::Sample(Tensor logits, std::span<const SampleRow> rows,
                    std::span<SampleResult> results) {
  TREADLE_CHECK(logits.rows == static_cast<int64_t>(rows.size()) && rows.size() == results.size());
  ForEachLogitRow(logits, [&](LogitRow& logit_row, int64_t row) {
    SampleOne(rows[row], logit_row, results[row]);
  });
  KeepSamples(rows, results);
}

void CpuOps::SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                         std::span<ShardSample> shards) {
  TREADLE_CHECK(logits.rows == static_cast<int64_t>(rows.size()) && rows.size() == shards.size());
  ForEachLogitRow(logits, [&](LogitRow& logit_row, int64_t row) {
    SampleShardOne(rows[row], first_token, logit_row, shards[row]);
  });
}

}  // namespace treadle
