// The order and the weights of candidates as the sampling kernels see them.
//
// Order (kernels/sampling.h, step 4): a candidate is one integer, its logit's bits made monotone
// above its token, so that ascending integers are descending logits with the lowest token first
// among equals, and no two candidates are equal.
//
// Weights (steps 4 to 8) are integers too: w = exp((x - x_first) / temperature) in units of 2^-43.
// Sums of them are exact, so they do not depend on the order in which threads add, and a draw
// compares integers. All weights that are lost below the unit are together less than 2^-23 of the
// total at 2^20 tokens: a float's rounding.
//
// Everything here is a pure function.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/simt.h"
#include "kernels/sampling.h"

namespace treadle::cuda {

inline constexpr int kTokenBits = 20;
inline constexpr int kOrderBits = 32 + kTokenBits;
inline constexpr uint64_t kNoCandidate = ~uint64_t{0};  // behind all candidates

// x: clean. Zeros of both signs are one.
TREADLE_DEVICE uint64_t OrderKey(float x, int32_t token) {
  const uint32_t bits = simt::AsBits(x + 0.0f);
  const uint32_t descending = (bits >> 31) != 0 ? bits : ~(bits | 0x80000000u);
  return (uint64_t{descending} << kTokenBits) | static_cast<uint32_t>(token);
}
TREADLE_DEVICE int32_t TokenOf(uint64_t key) {
  return static_cast<int32_t>(key & ((uint64_t{1} << kTokenBits) - 1));
}
TREADLE_DEVICE float LogitOf(uint64_t key) {
  const uint32_t descending = static_cast<uint32_t>(key >> kTokenBits);
  return simt::AsFloat((descending >> 31) != 0 ? descending : ~descending & 0x7fffffffu);
}

// A number of candidates and their weight.
struct Mass {
  uint64_t weight = 0;
  uint64_t count = 0;
};
TREADLE_DEVICE Mass operator+(Mass a, Mass b) { return {a.weight + b.weight, a.count + b.count}; }

// Bins of candidates by descending logit, narrow near the best one, where decisions fall; the last
// one is wide: all from exp(-13.8) on down to where weights vanish.
inline constexpr int kBins = 512;
inline constexpr int kNoBin = kBins;

class Weights {
 public:
  TREADLE_DEVICE Weights(float max, float temperature)
      : max_(max), temperature_(temperature), inverse_(1.0f / temperature) {
    inverse_ = CleanLogit(inverse_);
  }

  // At most 1, and 1 for the best.
  TREADLE_DEVICE float Weight(float x) const {
    return simt::Exp(simt::Divide(x - max_, temperature_));
  }
  TREADLE_DEVICE static uint64_t InUnits(float weight) {
    return static_cast<uint64_t>(weight * 0x1p43f);
  }
  TREADLE_DEVICE Mass MassOf(float x) const { return {InUnits(Weight(x)), 1}; }

  // Ascending as x descends; kNoBin if the weight is below a unit (ln 2^43 = 29.8055).
  TREADLE_DEVICE int Bin(float x) const {
    const float depth = (max_ - x) * inverse_;
    if (!(depth < 29.81f)) return kNoBin;
    const int bin = static_cast<int>(depth * (static_cast<float>(kBins) / 13.875f));
    return bin < kBins ? bin : kBins - 1;
  }

 private:
  float max_;
  float temperature_;
  float inverse_;
};

// The upper half of a * b.
TREADLE_DEVICE uint64_t MultiplyHigh(uint64_t a, uint64_t b) {
  const uint64_t a0 = a & 0xffffffffu, a1 = a >> 32;
  const uint64_t b0 = b & 0xffffffffu, b1 = b >> 32;
  const uint64_t middle = a1 * b0 + (a0 * b0 >> 32);
  const uint64_t cross = a0 * b1 + (middle & 0xffffffffu);
  return a1 * b1 + (middle >> 32) + (cross >> 32);
}

}  // namespace treadle::cuda
