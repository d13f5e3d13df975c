// The order, the weights and the random bits of the sampling kernels.
#include "kernels/cuda/sampling/sample_order.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>

#include "kernels/sampling.h"

namespace treadle::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(SampleOrderTest, KeysAreInTheOrderOfCandidates) {
  const float ascending[] = {-kInfinity, -3.4028234663852886e38f, -1.5f, -1e-45f, 0.0f, 1e-45f,
                             1.5f,       3.4028234663852886e38f};
  for (size_t i = 0; i < std::size(ascending); ++i) {
    EXPECT_EQ(LogitOf(OrderKey(ascending[i], 5)), ascending[i]);
    EXPECT_EQ(TokenOf(OrderKey(ascending[i], (1 << kTokenBits) - 1)), (1 << kTokenBits) - 1);
    EXPECT_LT(OrderKey(ascending[i], 4), OrderKey(ascending[i], 5));
    EXPECT_LT(OrderKey(ascending[i], 5), uint64_t{1} << kOrderBits);
    if (i > 0) {
      EXPECT_LT(OrderKey(ascending[i], 5), OrderKey(ascending[i - 1], 4));
    }
  }
  EXPECT_EQ(OrderKey(-0.0f, 3), OrderKey(0.0f, 3));
}

TEST(SampleOrderTest, BinsFollowTheOrderAndHoldAllThatCanBeDrawn) {
  std::mt19937 random(5);
  for (const float temperature : {1e-3f, 0.7f, 1.0f, 40.0f}) {
    const float max = 7.25f;
    const Weights weights(max, temperature);
    EXPECT_EQ(weights.Bin(max), 0);
    EXPECT_EQ(weights.MassOf(max).weight, uint64_t{1} << 43);
    EXPECT_EQ(weights.Bin(-kInfinity), kNoBin);
    float x = max;
    int bin = 0;
    for (int i = 0; i < 20000; ++i) {
      x -= temperature * static_cast<float>(random() % 1000) * 4e-6f;
      EXPECT_GE(weights.Bin(x), bin);
      bin = weights.Bin(x);
      if (bin == kNoBin) {
        EXPECT_EQ(weights.MassOf(x).weight, 0u);
      }
    }
    EXPECT_EQ(bin, kNoBin);
  }
}

TEST(SampleOrderTest, RandomBitsAreTheHosts) {
  std::mt19937_64 random(6);
  for (int i = 0; i < 1000; ++i) {
    const uint64_t seed = random();
    const auto candidate = static_cast<uint32_t>(random());
    const auto position = static_cast<int64_t>(random() >> 1);
    EXPECT_EQ(static_cast<double>(CounterBits(seed, candidate, position)) * 0x1p-64,
              CounterUniform(seed, candidate, position));
    const uint64_t b = random();
    __extension__ using Wide = unsigned __int128;
    EXPECT_EQ(MultiplyHigh(seed, b), static_cast<uint64_t>((Wide{seed} * b) >> 64));
  }
}

}  // namespace
}  // namespace treadle::cuda
