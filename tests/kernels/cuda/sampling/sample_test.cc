// Sampling kernels, emulated, against the reference: the same tokens and candidates over many
// shapes of logits and parameters, log probabilities within rounding, and equal bits for a row
// whatever its neighbours.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "tests/emulation/emulated_device.h"
#include "tests/kernels/cuda/sampling/emulated_sampler.h"
#include "tests/kernels/sample_questions.h"

namespace treadle::cuda {
namespace {

// Differences of the exact logit and maximum, and the sum's logarithm, are in double, and rounded
// once. Each exponential is off by two units in its last place, and by the rounding of its
// argument a: a 2^-24 of exp(-a), less than half of that. Sums are of doubles.
void ExpectSame(const SampleResult& got, const SampleResult& expected) {
  ExpectSameSample(got, expected,
                   [](float logprob) { return 0x1p-22 + std::abs(logprob) * 0x1p-23; });
}

void ExpectSame(const ShardSample& got, const ShardSample& expected) {
  EXPECT_EQ(got.max, expected.max);
  EXPECT_NEAR(got.sum, expected.sum, expected.sum * 0x1p-22);
  EXPECT_EQ(got.target_logit, expected.target_logit);
  ASSERT_EQ(got.num_top, expected.num_top);
  for (int32_t i = 0; i < got.num_top; ++i) {
    EXPECT_EQ(got.top[i].token, expected.top[i].token) << i;
    EXPECT_EQ(got.top[i].logprob, expected.top[i].logprob) << i;
  }
  ASSERT_EQ(got.num_candidates, expected.num_candidates);
  for (int32_t i = 0; i < got.num_candidates; ++i) {
    EXPECT_EQ(got.candidates[i].token, expected.candidates[i].token) << i;
    EXPECT_EQ(got.candidates[i].x, expected.candidates[i].x) << i;
    EXPECT_EQ(got.candidates[i].logit, expected.candidates[i].logit) << i;
  }
}

struct Size {
  int64_t rows, vocab;
};

void CompareWithReference(Size size, uint32_t seed) {
  const std::unique_ptr<Backend> reference = CreateReferenceBackend();
  EmulatedSampler sampler;
  std::mt19937 random(seed);
  for (const Shape shape : kShapes) {
    const Batch batch = RandomBatch(size.rows, size.vocab, shape, random);
    const std::vector<SampleResult> expected = SampleRows(*reference, batch, 0, size.rows);
    const std::vector<SampleResult> got = SampleRows(sampler, batch, 0, size.rows);
    for (int64_t i = 0; i < size.rows; ++i) {
      SCOPED_TRACE(testing::Message() << "shape " << static_cast<int>(shape) << ", vocabulary "
                                      << size.vocab << ", row " << i);
      ExpectSame(got[i], expected[i]);
      EXPECT_EQ(sampler.last_samples()[i], got[i].token);
    }
  }
}

TEST(CudaSampleTest, GivesTheReferencesTokensOfSmallVocabularies) {
  for (const Size size : {Size{60, 1}, Size{100, 7}, Size{150, 50}, Size{100, 513}}) {
    CompareWithReference(size, static_cast<uint32_t>(size.vocab));
  }
}

TEST(CudaSampleTest, GivesTheReferencesTokens) { CompareWithReference({200, 5000}, 1); }

// Several chunks, and more candidates in a bin than are sorted at once.
TEST(CudaSampleTest, GivesTheReferencesTokensOfLargeVocabularies) {
  CompareWithReference({40, 20011}, 2);
}
TEST(CudaSampleTest, GivesTheReferencesTokensOfTheLargestVocabularies) {
  CompareWithReference({4, 262208}, 3);
}

// One token far ahead of very many others, which together have a fifth of the weight: they share
// the last bin, and top-k, top-p and the draw fall in it.
TEST(CudaSampleTest, DrawsFromAfar) {
  constexpr int64_t kVocab = 262144;
  const SamplingParameters wishes_of_rows[] = {{},
                                               {.top_k = 100000},
                                               {.top_p = 0.97f},
                                               {.min_p = 6.5e-7f},
                                               {.top_k = 200000, .top_p = 0.95f, .min_p = 5e-7f}};
  std::mt19937 random(13);
  Batch batch;
  batch.vocab = kVocab;
  std::vector<float> logits = RandomLogits(Shape::kFlat, kVocab, random);
  logits[random() % kVocab] = 14.2f;
  for (const SamplingParameters& wishes : wishes_of_rows) {
    for (int tries = 0; tries < 3; ++tries) {
      batch.logits.insert(batch.logits.end(), logits.begin(), logits.end());
      auto question = std::make_unique<Question>();
      question->parameters = wishes;
      question->row.parameters = &question->parameters;
      // A random number that lies among the others.
      while (CounterUniform(0, 0, question->row.position) < 0.97) {
        question->row.position = static_cast<int64_t>(random());
      }
      batch.questions.push_back(std::move(question));
    }
  }
  const std::unique_ptr<Backend> reference = CreateReferenceBackend();
  EmulatedSampler sampler;
  const std::vector<SampleResult> expected = SampleRows(*reference, batch, 0, batch.rows());
  const std::vector<SampleResult> got = SampleRows(sampler, batch, 0, batch.rows());
  for (int64_t i = 0; i < batch.rows(); ++i) {
    EXPECT_EQ(got[i].token, expected[i].token) << i;
    EXPECT_LT(logits[got[i].token], 1.0f) << i;
  }
}

TEST(CudaSampleTest, NeighboursAndTheOrderOfThreadsLeaveNoTrace) {
  std::mt19937 random(7);
  for (const Shape shape : {Shape::kPeaked, Shape::kFlat, Shape::kTies}) {
    const Batch batch = RandomBatch(12, 20011, shape, random);
    EmulatedSampler together;
    const std::vector<SampleResult> expected = SampleRows(together, batch, 0, 12);
    const ScopedEmulation other_order({.seed = 99});
    EmulatedSampler alone;
    for (int64_t i = 0; i < 12; ++i) {
      EXPECT_TRUE(SameBits(SampleRows(alone, batch, i, 1)[0], expected[i])) << i;
    }
  }
}

TEST(CudaSampleTest, GreedyEdges) {
  SamplingParameters greedy = {.temperature = 0.0f};
  const std::vector<std::pair<std::vector<float>, int32_t>> cases = {
      {{1, 3, 3, 2}, 1},
      {{kNaN, -1, kNaN, -1}, 1},
      {{kNaN, kNaN, -kInfinity}, 0},
      {{1, kInfinity, 3.4028234663852886e38f, kInfinity}, 1},
      {{-0.0f, 0.0f}, 0},
      {{-kInfinity, -kInfinity, -5}, 2},
      {{-3.4028234663852886e38f, -kInfinity, -1e-45f, -1e-44f}, 2},
  };
  EmulatedSampler sampler;
  for (const auto& [logits, token] : cases) {
    const SampleRow row = {.parameters = &greedy};
    SampleResult result;
    std::vector<float> x = logits;
    sampler.Sample(DenseTensor(x.data(), DType::kF32, 1, std::ssize(x)), {&row, 1}, {&result, 1});
    EXPECT_EQ(result.token, token);
  }
}

// A shard in the middle of the vocabulary, that of a rank: what lies outside is ignored.
TEST(CudaSampleTest, GivesTheReferencesShards) {
  const std::unique_ptr<Backend> reference = CreateReferenceBackend();
  EmulatedSampler sampler;
  std::mt19937 random(11);
  for (const Size size : {Size{60, 3}, Size{80, 200}, Size{60, 3001}, Size{12, 30000}}) {
    for (const Shape shape : kShapes) {
      Batch batch = RandomBatch(size.rows, size.vocab, shape, random);
      const int64_t first = static_cast<int64_t>(random() % size.vocab);
      const int64_t tokens = 1 + static_cast<int64_t>(random() % (size.vocab - first));
      std::vector<float> logits = batch.Part(0, size.rows, first, tokens);
      const Tensor tensor = DenseTensor(logits.data(), DType::kF32, size.rows, tokens);
      const std::vector<SampleRow> rows = batch.Rows(0, size.rows);
      std::vector<ShardSample> got(rows.size());
      std::vector<ShardSample> expected(rows.size());
      sampler.SampleShard(tensor, static_cast<int32_t>(first), rows, size.vocab, got);
      reference->SampleShard(tensor, static_cast<int32_t>(first), rows, expected);
      for (int64_t i = 0; i < size.rows; ++i) {
        SCOPED_TRACE(testing::Message()
                     << "shape " << static_cast<int>(shape) << ", tokens " << first << " to "
                     << first + tokens << " of " << size.vocab << ", row " << i);
        ExpectSame(got[i], expected[i]);
      }
    }
  }
}

// The draw over many positions follows the distribution, by either way to a token: a chi-square
// test at 1e-6 with 9 degrees of freedom.
TEST(CudaSampleTest, DrawsFollowTheWeights) {
  std::vector<float> logits;
  for (int i = 0; i < 10; ++i) logits.push_back(0.3f * static_cast<float>(i));
  double total = 0.0;
  for (const float x : logits) total += std::exp(x / 0.8);
  constexpr int kDraws = 10000;
  std::vector<float> x;
  for (int i = 0; i < kDraws; ++i) x.insert(x.end(), logits.begin(), logits.end());
  EmulatedSampler sampler;
  for (const int32_t top_k : {0, 64}) {
    const SamplingParameters parameters = {.temperature = 0.8f, .top_k = top_k};
    std::vector<SampleRow> rows(kDraws, SampleRow{.parameters = &parameters});
    for (int i = 0; i < kDraws; ++i) rows[i].position = i;
    std::vector<SampleResult> results(kDraws);
    sampler.Sample(DenseTensor(x.data(), DType::kF32, kDraws, 10), rows, results);
    std::vector<int> seen(logits.size());
    for (const SampleResult& result : results) ++seen[result.token];
    double chi_square = 0.0;
    for (size_t i = 0; i < logits.size(); ++i) {
      const double expected = kDraws * std::exp(logits[i] / 0.8) / total;
      chi_square += (seen[i] - expected) * (seen[i] - expected) / expected;
    }
    EXPECT_LT(chi_square, 44.8) << "top_k " << top_k;
  }
}

}  // namespace
}  // namespace treadle::cuda
