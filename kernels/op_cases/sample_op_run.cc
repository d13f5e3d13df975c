// Sample and SampleShard: rows of logits with requests of every kind.
#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <type_traits>

#include "kernels/op_cases/guarded_tensor.h"
#include "kernels/op_cases/op_runs.h"
#include "kernels/op_cases/random.h"

namespace treadle::op_runs {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Everything that one SampleRow points to.
struct Wishes {
  SamplingParameters parameters;
  std::vector<TokenCount> counts;
  std::vector<int32_t> suppressed;
  std::vector<uint32_t> mask;
  SampleRow row;
};

// A shard has tokens on both sides of it.
constexpr int32_t kBefore = 37;
constexpr int32_t kBehind = 21;

// What both ops are asked. Result: SampleResult or ShardSample.
template <typename Result>
class SampleRun : public OpRun {
 public:
  SampleRun(const OpCase& c, Backend& backend, uint64_t seed)
      : case_(c), backend_(backend), logits_(backend, c.rows, c.cols) {
    Random random(seed);
    for (int64_t row = 0; row < c.rows; ++row) {
      FillLogits(row, random);
      wishes_.emplace_back();
      const auto kind = c.sampling == OpCase::Sampling::kMixed
                            ? static_cast<OpCase::Sampling>(row % 6)
                            : c.sampling;
      Draw(kind, row, random, wishes_.back());
    }
    Reset();
  }

  ~SampleRun() override { Finish(); }  // results are on their way to this object

  void Reset() override {
    Finish();
    logits_.Upload();
    results_.assign(static_cast<size_t>(case_.rows), {});
    rows_.clear();
    for (const Wishes& wishes : wishes_) rows_.push_back(wishes.row);
  }
  absl::Status CheckGuards() const override { return logits_.CheckGuards("logits", false); }
  int64_t rows() const override { return case_.rows; }
  double bytes() const override { return 4.0 * static_cast<double>(case_.rows * case_.cols); }
  double operations() const override { return 2.0 * static_cast<double>(case_.rows * case_.cols); }

 protected:
  static constexpr bool kShard = std::is_same_v<Result, ShardSample>;

  // Logits' maximum and values are exact; a log probability is a difference of them and
  // the logarithm of a sum of cols terms.
  double LargestOf(int64_t row) const {
    double largest = 0;
    for (int64_t i = 0; i < case_.cols; ++i) {
      const double size = std::fabs(logits_.Row(row)[i]);
      if (size < 1e30) largest = std::max(largest, size);
    }
    return largest;
  }
  void Finish() const { TREADLE_CHECK(backend_.Synchronize().ok()); }
  double SumUnits() const { return std::sqrt(static_cast<double>(case_.cols)) / 4; }

  const OpCase case_;
  Backend& backend_;
  GuardedTensor logits_;
  std::vector<SampleRow> rows_;
  std::vector<Result> results_;

 private:
  // Token ids are of the whole vocabulary.
  int64_t Vocab() const { return case_.cols + (kShard ? kBefore + kBehind : 0); }

  // Every third row has ties, a mixed batch also NaN and infinities.
  void FillLogits(int64_t row, Random& random) {
    float* x = logits_.Row(row);
    for (int64_t i = 0; i < case_.cols; ++i) {
      x[i] = 2 * random.Normal() + (random.Below(case_.cols) < 8 ? 8.0f : 0.0f);
      if (row % 3 == 2) x[i] = std::round(x[i] * 4) / 4;
    }
    if (case_.sampling != OpCase::Sampling::kMixed) return;
    const auto put = [&](float value) { x[random.Below(case_.cols)] = value; };
    if (row % 4 == 1) put(-kInfinity);
    if (row % 4 == 2) put(std::numeric_limits<float>::quiet_NaN());
    if (row == 7) std::fill_n(x, case_.cols, -kInfinity);
    if (row == 8) std::fill_n(x, case_.cols, std::numeric_limits<float>::quiet_NaN());
    if (row == 9) put(kInfinity);
  }

  void Draw(OpCase::Sampling kind, int64_t row, Random& random, Wishes& wishes) {
    using Sampling = OpCase::Sampling;
    SamplingParameters& parameters = wishes.parameters;
    parameters.temperature =
        kind == Sampling::kGreedy ? 0.0f : static_cast<float>(random.Uniform(0.3, 1.5));
    parameters.seed = SeedOf("sample", static_cast<uint64_t>(row));
    constexpr int32_t kTopK[] = {1, 2, 7, 40, 1000, 1 << 20};
    if (kind == Sampling::kTopK) parameters.top_k = kTopK[row % std::size(kTopK)];
    if (kind == Sampling::kTopPMinP) {
      parameters.top_p = static_cast<float>(random.Uniform(0.05, 1));
      parameters.min_p = row % 2 == 0 ? 0.0f : static_cast<float>(random.Uniform(0, 0.2));
      parameters.top_k = row % 3 == 0 ? 50 : 0;
    }
    if (kind == Sampling::kPenalties) DrawPenalties(random, wishes);
    if (kShard && kind == Sampling::kPenalties) parameters.top_k = 20;  // has candidates
    wishes.row = {.parameters = &wishes.parameters,
                  .counts = wishes.counts,
                  .suppressed = wishes.suppressed,
                  .mask = wishes.mask.empty() ? nullptr : wishes.mask.data(),
                  .candidate = static_cast<uint32_t>(row % 3),
                  .position = 5 * row + 1};
    if (kind == Sampling::kLogprobs) {
      constexpr int32_t kTop[] = {0, 1, 5, kMaxTopLogprobs};
      wishes.row.top_logprobs = kTop[row % std::size(kTop)];
      if (row % 2 == 1) wishes.row.target = static_cast<int32_t>(random.Below(Vocab()));
      if (row % 5 == 4) wishes.row.parameters = nullptr;  // prompt log probabilities
    }
  }

  void DrawPenalties(Random& random, Wishes& wishes) {
    SamplingParameters& parameters = wishes.parameters;
    parameters.repetition_penalty = static_cast<float>(random.Uniform(0.8, 1.4));
    parameters.presence_penalty = static_cast<float>(random.Uniform(-1, 1));
    parameters.frequency_penalty = static_cast<float>(random.Uniform(-0.5, 0.5));
    for (int64_t token = random.Below(3); token < Vocab(); token += 1 + random.Below(9)) {
      const auto id = static_cast<int32_t>(token);
      const auto in_output = static_cast<int32_t>(random.Below(3));
      wishes.counts.push_back(
          {id, in_output == 0 ? 1 : static_cast<int32_t>(random.Below(2)), in_output});
      if (random.Below(8) == 0) {
        parameters.logit_bias.push_back({id, static_cast<float>(random.Uniform(-5, 5))});
      }
      if (random.Below(8) == 0) wishes.suppressed.push_back(id);
    }
    wishes.mask.resize(static_cast<size_t>(Vocab() + 31) / 32);
    for (uint32_t& word : wishes.mask) word = static_cast<uint32_t>(random.Below(int64_t{1} << 32));
  }

  std::deque<Wishes> wishes_;
};

class Sample final : public SampleRun<SampleResult> {
 public:
  using SampleRun::SampleRun;

  void RunRows(int64_t begin, int64_t count) override {
    backend_.Sample(logits_.view().Rows(begin, count), std::span(rows_).subspan(begin, count),
                    std::span(results_).subspan(begin, count));
  }
  std::vector<float> Output() const override {
    Finish();
    std::vector<float> out;
    for (const SampleResult& result : results_) {
      out.insert(out.end(), {static_cast<float>(result.token), result.logprob,
                             result.target_logprob, static_cast<float>(result.num_top)});
      for (int32_t i = 0; i < kMaxTopLogprobs; ++i) {
        const bool set = i < result.num_top;
        out.push_back(set ? static_cast<float>(result.top[i].token) : -1);
        out.push_back(set ? result.top[i].logprob : 0);
      }
    }
    return out;
  }
  // Tokens exactly.
  std::vector<float> Tolerance(const Arithmetic&) const override {
    std::vector<float> tolerance;
    for (int64_t row = 0; row < case_.rows; ++row) {
      const float unit = static_cast<float>(kFloatUnit * (16 + SumUnits() + 6 * LargestOf(row)));
      tolerance.insert(tolerance.end(), {0, unit, unit, 0});
      for (int32_t i = 0; i < kMaxTopLogprobs; ++i) tolerance.insert(tolerance.end(), {0, unit});
    }
    return tolerance;
  }
};

class SampleShard final : public SampleRun<treadle::ShardSample> {
 public:
  using SampleRun::SampleRun;

  void RunRows(int64_t begin, int64_t count) override {
    backend_.SampleShard(logits_.view().Rows(begin, count), kBefore,
                         std::span(rows_).subspan(begin, count),
                         std::span(results_).subspan(begin, count));
  }
  std::vector<float> Output() const override {
    Finish();
    std::vector<float> out;
    for (const ShardSample& shard : results_) {
      out.insert(out.end(),
                 {shard.sum, shard.max, shard.target_logit, static_cast<float>(shard.num_top),
                  static_cast<float>(shard.num_candidates)});
      for (int32_t i = 0; i < shard.num_top; ++i) {
        out.push_back(static_cast<float>(shard.top[i].token));
        out.push_back(shard.top[i].logprob);
      }
      for (int32_t i = 0; i < shard.num_candidates; ++i) {
        const ShardCandidate& candidate = shard.candidates[i];
        out.insert(out.end(), {static_cast<float>(candidate.token), candidate.x, candidate.logit});
      }
    }
    return out;
  }
  // All is exact but the sum, of which each term has its own rounding and that of its exponent.
  std::vector<float> Tolerance(const Arithmetic&) const override {
    std::vector<float> tolerance;
    for (int64_t row = 0; row < case_.rows; ++row) {
      const ShardSample& shard = results_[row];
      tolerance.push_back(
          static_cast<float>(kFloatUnit * shard.sum * (16 + SumUnits() + 6 * LargestOf(row))));
      tolerance.resize(tolerance.size() + 4 + 2 * shard.num_top + 3 * shard.num_candidates);
    }
    return tolerance;
  }
};

}  // namespace

std::unique_ptr<OpRun> MakeSample(const OpCase& op_case, Backend& backend, uint64_t seed) {
  return std::make_unique<Sample>(op_case, backend, seed);
}
std::unique_ptr<OpRun> MakeSampleShard(const OpCase& op_case, Backend& backend, uint64_t seed) {
  return std::make_unique<SampleShard>(op_case, backend, seed);
}

}  // namespace treadle::op_runs
