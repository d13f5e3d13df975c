// The random numbers against Random123's published vectors, and the definition of sampling on the
// reference against transformers' logits processors and hand-worked numbers.
#include "kernels/sampling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/reference/reference_backend.h"
#include "tests/support/oracles.h"

namespace treadle {
namespace {

using Words = std::array<uint32_t, 4>;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Random123 1.14, tests/kat_vectors: "philox4x32 10".
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(Philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(CounterUniform, UsesSeedCandidateAndPosition) {
  const Words words = Philox4x32({0x9abcdef0, 0x12345678, 7, 0}, {0x89abcdef, 0x01234567});
  const uint64_t bits = (uint64_t{words[1]} << 32 | words[0]) >> 11;
  const double expected = static_cast<double>(bits) / 9007199254740992.0;
  EXPECT_EQ(CounterUniform(0x0123456789abcdef, 7, 0x123456789abcdef0), expected);
  EXPECT_NE(CounterUniform(1, 0, 0), CounterUniform(2, 0, 0));
  EXPECT_NE(CounterUniform(1, 0, 0), CounterUniform(1, 1, 0));
  EXPECT_NE(CounterUniform(1, 0, 0), CounterUniform(1, 0, 1));
}

TEST(CounterUniform, IsUniform) {
  constexpr int kDraws = 100000;
  std::array<int, 20> bins = {};
  for (int i = 0; i < kDraws; ++i) {
    const double u = CounterUniform(42, 3, i);
    ASSERT_GE(u, 0);
    ASSERT_LT(u, 1);
    ++bins[static_cast<size_t>(u * bins.size())];
  }
  double chi_square = 0;
  const double expected = static_cast<double>(kDraws) / bins.size();
  for (int count : bins) chi_square += (count - expected) * (count - expected) / expected;
  EXPECT_LT(chi_square, 50);  // 19 degrees of freedom: exceeded once in 7,000 streams
}

int32_t Token(std::span<const float> logits, const SamplingParameters& parameters,
              SampleRow row = {}) {
  row.parameters = &parameters;
  return ReferenceSample(logits, row).token;
}

TEST(Sampling, DistributionMatchesTransformers) {
  const auto oracle = ReadOracles("op_oracles.json")["sampling"];
  const std::vector<float> logits = Floats(oracle["logits"]);
  for (const auto& c : oracle["cases"]) {
    SamplingParameters parameters;
    parameters.temperature = c["temperature"];
    parameters.top_k = c["top_k"];
    parameters.top_p = c["top_p"];
    parameters.min_p = c["min_p"];
    parameters.repetition_penalty = c["repetition_penalty"];
    parameters.seed = 11;
    std::vector<TokenCount> counts;
    for (int32_t token : c["seen"]) counts.push_back({token, token % 2, 1 - token % 2});
    constexpr int kDraws = 20000;
    std::vector<int> drawn(logits.size());
    for (int i = 0; i < kDraws; ++i) {
      ++drawn[Token(logits, parameters, {.counts = counts, .position = i})];
    }
    double chi_square = 0;
    int degrees = -1;
    for (size_t token = 0; token < logits.size(); ++token) {
      const double expected = kDraws * c["probabilities"][token].get<double>();
      if (expected == 0) {
        EXPECT_EQ(drawn[token], 0) << c << " token " << token;
        continue;
      }
      ++degrees;
      chi_square += (drawn[token] - expected) * (drawn[token] - expected) / expected;
    }
    // About the 1e-4 quantile for the few degrees of freedom here.
    EXPECT_LT(chi_square, degrees + 4 * std::sqrt(2.0 * degrees) + 8) << c;
  }
}

TEST(Sampling, GreedyTakesTheLowestIdOfATie) {
  const std::vector<float> logits = {0, 3, -1, 3, 3};
  EXPECT_EQ(Token(logits, {.temperature = 0}), 1);
  // A zero temperature needs no random number, so no other wish matters either.
  EXPECT_EQ(Token(logits, {.temperature = 0, .top_k = 3, .top_p = 0.1f}), 1);
}

TEST(Sampling, OneCandidateLeavesNoChoice) {
  const std::vector<float> logits = {0, 1, 2.5f, 2.5f, 2};
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(Token(logits, {.top_k = 1}, {.position = i}), 2);
    EXPECT_EQ(Token(logits, {.top_p = 1e-6f}, {.position = i}), 2);
    const int32_t best = Token(logits, {.min_p = 1.0f}, {.position = i});
    EXPECT_TRUE(best == 2 || best == 3);  // equals of the best stay
  }
}

// After all adjustments a token's value shows as the bias that makes a neutral token of logit 0 and
// higher id tie with it (and lose), while the next float wins.
void ExpectAdjusted(std::vector<float> logits, SamplingParameters parameters, SampleRow row,
                    int32_t token, float value) {
  std::vector<int32_t> others;
  for (int32_t i = 0; i < static_cast<int32_t>(logits.size()); ++i) {
    if (i != token) others.push_back(i);
  }
  row.suppressed = others;
  parameters.temperature = 0;
  const auto neutral = static_cast<int32_t>(logits.size());
  logits.push_back(0);
  parameters.logit_bias.push_back({neutral, value});
  EXPECT_EQ(Token(logits, parameters, row), token) << "token " << token << " below " << value;
  parameters.logit_bias.back().bias = std::nextafter(value, kInfinity);
  EXPECT_EQ(Token(logits, parameters, row), neutral) << "token " << token << " above " << value;
}

TEST(Sampling, PenaltiesByHand) {
  SamplingParameters parameters;
  parameters.repetition_penalty = 2;
  parameters.presence_penalty = 0.5f;
  parameters.frequency_penalty = 0.25f;
  parameters.logit_bias = {{4, 3.0f}, {4, -1.0f}};
  const std::vector<TokenCount> counts = {{0, 3, 0}, {1, 0, 2}, {2, 1, 1}, {4, 0, 1}};
  const std::vector<float> logits = {2, -2, 1, 7, 0.5f};
  const SampleRow row = {.counts = counts};
  ExpectAdjusted(logits, parameters, row, 0, 1.0f);    // 2 / 2, only in the prompt
  ExpectAdjusted(logits, parameters, row, 1, -5.0f);   // -2 * 2 - 0.5 - 2 * 0.25
  ExpectAdjusted(logits, parameters, row, 2, -0.25f);  // 1 / 2 - 0.5 - 0.25
  ExpectAdjusted(logits, parameters, row, 3, 7.0f);    // not seen
  ExpectAdjusted(logits, parameters, row, 4, 0.5f);    // (0.5 + 3 - 1) / 2 - 0.5 - 0.25
}

TEST(Sampling, MaskAndSuppressionForbid) {
  const std::vector<float> logits(70, 1.0f);
  const std::vector<uint32_t> mask = {0x80000000, 0x1, 0x3f};  // 31, 32, 64..69
  const std::vector<int32_t> suppressed = {32, 64, 65, 66, 67};
  std::vector<int> drawn(70);
  for (int i = 0; i < 500; ++i) {
    ++drawn[Token(logits, {}, {.suppressed = suppressed, .mask = mask.data(), .position = i})];
  }
  for (int32_t token = 0; token < 70; ++token) {
    EXPECT_EQ(drawn[token] > 0, token == 31 || token == 68 || token == 69) << token;
  }
}

TEST(Sampling, BrokenLogitsStillGiveAToken) {
  const SamplingParameters greedy = {.temperature = 0};
  const SamplingParameters plain;
  EXPECT_EQ(Token(std::vector<float>{kNaN, 1, kNaN, 2}, greedy), 3);
  EXPECT_EQ(Token(std::vector<float>{kNaN, -kInfinity, 2, kNaN}, plain), 2);
  EXPECT_EQ(Token(std::vector<float>{0, kInfinity, 2, kInfinity}, greedy), 1);
  EXPECT_EQ(Token(std::vector<float>{0, kInfinity, 2, 3}, plain), 1);
  EXPECT_EQ(Token(std::vector<float>(4, kNaN), plain), 0);
  EXPECT_EQ(Token(std::vector<float>(4, -kInfinity), greedy), 0);
}

TEST(Sampling, LogprobsAreOfTheRawLogits) {
  const auto oracle = ReadOracles("op_oracles.json")["sampling"];
  const std::vector<float> logits = Floats(oracle["logits"]);
  const std::vector<float> expected = Floats(oracle["logprobs"]);
  SamplingParameters parameters;
  parameters.temperature = 0.25f;
  parameters.logit_bias = {{5, 100.0f}};
  const SampleResult result =
      ReferenceSample(logits, {.parameters = &parameters, .top_logprobs = 20, .target = 17});
  EXPECT_EQ(result.token, 5);
  EXPECT_FLOAT_EQ(result.logprob, expected[5]);
  EXPECT_FLOAT_EQ(result.target_logprob, expected[17]);
  ASSERT_EQ(result.num_top, 20);
  for (int i = 0; i < 20; ++i) {
    EXPECT_FLOAT_EQ(result.top[i].logprob, expected[result.top[i].token]);
    if (i > 0) {
      EXPECT_LE(result.top[i].logprob, result.top[i - 1].logprob);
    }
  }

  double sum = 0;
  for (int32_t token = 0; token < static_cast<int32_t>(logits.size()); ++token) {
    const SampleRow row = {.top_logprobs = 0, .target = token};
    const SampleResult only = ReferenceSample(logits, row);
    EXPECT_EQ(only.token, -1);
    EXPECT_EQ(only.num_top, 0);
    sum += std::exp(double{only.target_logprob});
  }
  EXPECT_NEAR(sum, 1, 24 * 0x1p-22);  // each rounded to float at |logprob| < 16
}

TEST(Sampling, TopLogprobsOfSmallAndTiedRows) {
  const std::vector<float> logits = {1, 2, -kInfinity, 2};
  const SampleResult result = ReferenceSample(logits, {.top_logprobs = 20, .target = 2});
  ASSERT_EQ(result.num_top, 4);
  EXPECT_EQ(result.top[0].token, 1);
  EXPECT_EQ(result.top[1].token, 3);
  EXPECT_EQ(result.top[2].token, 0);
  EXPECT_EQ(result.top[3].token, 2);
  EXPECT_EQ(result.target_logprob, -kInfinity);
}

}  // namespace
}  // namespace treadle
