// Sampling on the CPU against the reference's: the same tokens over many shapes of logits and
// parameters, log probabilities within rounding, and equal bits for any threads and instruction
// set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "tests/kernels/cpu/cpu_setting.h"
#include "tests/kernels/sample_questions.h"

namespace treadle {
namespace {

// The logit and the maximum are exact, their difference is rounded once more in float at the end.
// The sum of exponentials is off by less than 1 ulp of each plus the 70 roundings of a chunk.
void ExpectSame(const SampleResult& got, const SampleResult& expected) {
  ExpectSameSample(got, expected,
                   [](float logprob) { return 72 * 0x1p-23 + std::abs(logprob) * 0x1p-22; });
}

TEST(CpuSampleTest, GivesTheReferencesTokens) {
  const std::unique_ptr<Backend> reference = CreateReferenceBackend();
  std::mt19937 random(1);
  for (const Shape shape : kShapes) {
    for (const auto& [rows, vocab] : std::vector<std::pair<int64_t, int64_t>>{
             {60, 1}, {60, 7}, {60, 33}, {100, 1000}, {24, 49152}}) {
      const Batch batch = RandomBatch(rows, vocab, shape, random);
      const std::vector<SampleResult> expected = SampleRows(*reference, batch, 0, rows);
      for (const CpuIsa isa : SupportedIsas()) {
        const auto ops = MakeCpuBackend({isa, ComputeMode::kExact}, 2);
        const std::vector<SampleResult> got = SampleRows(*ops, batch, 0, rows);
        for (int64_t i = 0; i < rows; ++i) {
          SCOPED_TRACE(testing::Message() << Name(isa) << ", shape " << static_cast<int>(shape)
                                          << ", vocabulary " << vocab << ", row " << i);
          ExpectSame(got[i], expected[i]);
        }
      }
    }
  }
}

TEST(CpuSampleTest, ThreadsBatchAndInstructionSetLeaveNoTrace) {
  std::mt19937 random(7);
  const Batch batch = RandomBatch(12, 20011, Shape::kPeaked, random);
  const auto first = MakeCpuBackend({SupportedIsas().front(), ComputeMode::kExact}, 1);
  const std::vector<SampleResult> expected = SampleRows(*first, batch, 0, 12);
  for (const CpuIsa isa : SupportedIsas()) {
    for (const int threads : {1, 2, 3}) {
      const auto ops = MakeCpuBackend({isa, ComputeMode::kExact}, threads);
      const std::vector<SampleResult> together = SampleRows(*ops, batch, 0, 12);
      for (int64_t i = 0; i < 12; ++i) {
        EXPECT_TRUE(SameBits(together[i], expected[i])) << i;
        EXPECT_TRUE(SameBits(SampleRows(*ops, batch, i, 1)[0], expected[i])) << i << " alone";
      }
    }
  }
}

TEST(CpuSampleTest, GreedyEdges) {
  SamplingParameters greedy;
  greedy.temperature = 0.0f;
  const std::vector<std::pair<std::vector<float>, int32_t>> cases = {
      {{1, 3, 3, 2}, 1},
      {{kNaN, -1, kNaN, -1}, 1},
      {{kNaN, kNaN, -kInfinity}, 0},
      {{1, kInfinity, 3.4028234663852886e38f, kInfinity}, 1},
      {{-0.0f, 0.0f}, 0},
      {{-kInfinity, -kInfinity, -5}, 2},
  };
  for (const CpuIsa isa : SupportedIsas()) {
    const auto ops = MakeCpuBackend({isa, ComputeMode::kExact}, 1);
    for (const auto& [logits, token] : cases) {
      for (const float temperature : {0.0f, 1e-6f}) {
        // At a temperature near 0 only what ties with the best can be drawn.
        greedy.temperature = temperature;
        SampleRow row;
        row.parameters = &greedy;
        SampleResult result;
        std::vector<float> x = logits;
        ops->Sample(DenseTensor(x.data(), DType::kF32, 1, static_cast<int64_t>(x.size())),
                    {&row, 1}, {&result, 1});
        if (temperature == 0.0f) {
          EXPECT_EQ(result.token, token);
        } else {
          const float drawn = logits[result.token];
          EXPECT_TRUE(result.token == token || drawn == logits[token] || drawn > 3e38f) << drawn;
        }
      }
    }
  }
}

// Uneven parts of [0, vocab), in order, none empty: their ends.
std::vector<int64_t> RandomCuts(int64_t vocab, std::mt19937& random) {
  std::vector<int64_t> ends = {vocab};
  for (int64_t cuts = random() % 4; cuts > 0 && vocab > 1; --cuts) {
    ends.push_back(1 + static_cast<int64_t>(random() % (vocab - 1)));
  }
  std::ranges::sort(ends);
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  return ends;
}

// Each row by shards that end at `ends`; those that cannot be merged are left empty.
template <typename Sampler>
std::vector<SampleResult> SampleShards(Sampler& sampler, const Batch& batch,
                                       std::span<const int64_t> ends) {
  const std::vector<SampleRow> rows = batch.Rows(0, batch.rows());
  std::vector<std::vector<ShardSample>> shards(rows.size());
  int64_t first = 0;
  for (const int64_t end : ends) {
    const int64_t tokens = end - first;
    std::vector<float> part = batch.Part(0, batch.rows(), first, tokens);
    std::vector<ShardSample> samples(rows.size());
    sampler.SampleShard(DenseTensor(part.data(), DType::kF32, std::ssize(rows), tokens),
                        static_cast<int32_t>(first), rows, samples);
    for (size_t i = 0; i < rows.size(); ++i) shards[i].push_back(samples[i]);
    first = end;
  }
  std::vector<SampleResult> results(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (CanMergeShards(rows[i])) results[i] = MergeShards(rows[i], shards[i]);
  }
  return results;
}

TEST(ShardSampleTest, MergedShardsAreTheWholeRow) {
  const std::unique_ptr<Backend> reference = CreateReferenceBackend();
  std::vector<std::unique_ptr<Backend>> devices;
  for (const CpuIsa isa : SupportedIsas()) {
    devices.push_back(MakeCpuBackend({isa, ComputeMode::kExact}, 2));
  }
  std::mt19937 random(3);
  for (const Shape shape : kShapes) {
    for (const auto& [rows, vocab] : std::vector<std::pair<int64_t, int64_t>>{
             {60, 1}, {90, 7}, {90, 33}, {150, 1000}, {1, 40000}, {12, 20011}}) {
      Batch batch = RandomBatch(rows, vocab, shape, random);
      for (auto& question : batch.questions) {
        const int32_t top_ks[] = {1, 2, 5, 40, kMaxShardCandidates};
        question->parameters.top_k = top_ks[random() % 5];
        ASSERT_TRUE(CanMergeShards(question->row));
      }
      const std::vector<SampleResult> expected = SampleRows(*reference, batch, 0, rows);
      const std::vector<int64_t> ends = RandomCuts(vocab, random);
      const auto compare = [&](const std::vector<SampleResult>& got) {
        for (int64_t i = 0; i < rows; ++i) {
          SCOPED_TRACE(testing::Message() << "shape " << static_cast<int>(shape) << ", vocabulary "
                                          << vocab << ", " << ends.size() << " shards, row " << i);
          ExpectSame(got[i], expected[i]);
        }
      };
      compare(SampleShards(*reference, batch, ends));
      for (const auto& device : devices) compare(SampleShards(*device, batch, ends));
    }
  }
}

// Log probabilities come out whether the row can be merged or not; candidates only if it can.
TEST(ShardSampleTest, RowsThatCannotBeMerged) {
  const auto ops = MakeCpuBackend({SupportedIsas().back(), ComputeMode::kExact}, 1);
  const std::unique_ptr<Backend> reference = CreateReferenceBackend();
  SamplingParameters parameters;
  for (const int32_t top_k : {0, kMaxShardCandidates + 1}) {
    parameters.top_k = top_k;
    const SampleRow row = {.parameters = &parameters, .top_logprobs = 3, .target = 12};
    EXPECT_FALSE(CanMergeShards(row));
    std::vector<float> x = {0.5f, -1, 2, kNaN, 1};
    const auto check = [&](auto& sampler) {
      ShardSample shard;
      sampler.SampleShard(DenseTensor(x.data(), DType::kF32, 1, 5), 10, {&row, 1}, {&shard, 1});
      EXPECT_EQ(shard.num_candidates, 0);
      EXPECT_EQ(shard.max, 2);
      EXPECT_EQ(shard.target_logit, 2);
      ASSERT_EQ(shard.num_top, 3);
      EXPECT_EQ(shard.top[0].token, 12);
      EXPECT_EQ(shard.top[1].token, 14);
      EXPECT_EQ(shard.top[2].token, 10);
    };
    check(*ops);
    check(*reference);
  }
}

// Plain sampling follows the distribution: a chi-square test at 1e-6 with 9 degrees of freedom.
TEST(CpuSampleTest, DrawsFollowTheWeights) {
  std::vector<float> logits;
  for (int i = 0; i < 10; ++i) logits.push_back(0.3f * static_cast<float>(i));
  double total = 0.0;
  for (const float x : logits) total += std::exp(x / 0.8);
  SamplingParameters parameters;
  parameters.temperature = 0.8f;
  const auto ops = MakeCpuBackend({SupportedIsas().back(), ComputeMode::kExact}, 1);
  const int draws = 20000;
  std::vector<int> seen(logits.size());
  for (int i = 0; i < draws; ++i) {
    SampleRow row;
    row.parameters = &parameters;
    row.position = i;
    SampleResult result;
    std::vector<float> x = logits;
    ops->Sample(DenseTensor(x.data(), DType::kF32, 1, 10), {&row, 1}, {&result, 1});
    ++seen[result.token];
  }
  double chi_square = 0.0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double expected = draws * std::exp(logits[i] / 0.8) / total;
    chi_square += (seen[i] - expected) * (seen[i] - expected) / expected;
  }
  EXPECT_LT(chi_square, 44.8);
}

}  // namespace
}  // namespace treadle
