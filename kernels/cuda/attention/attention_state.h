// A thread's part of the online softmax of 16 * kM (row, head) pairs over 8 * kN features, in the
// registers of the matrix instructions (simt.h: fragment D): with g = lane / 4 and t = lane % 4, of
// pairs 16 m + g and 16 m + g + 8 the features 8 n + 2t and 8 n + 2t + 1.
//
// Sums of weights are made as one more column of V that holds ones: of the very numbers, rounded to
// 16 bits, that multiply V, and in the same order.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention/attention_fold.h"
#include "kernels/cuda/attention/attention_map.h"
#include "kernels/cuda/runtime/simt.h"
#include "kernels/dtype.h"

namespace treadle::cuda {

// The 16-bit type of a cache, which q and the weights are rounded to as well.
template <DType kType>
struct Element16 {
  static_assert(kType == DType::kF16 || kType == DType::kBF16);
  static constexpr uint32_t kOnes = kType == DType::kF16 ? 0x3c003c00u : 0x3f803f80u;

  TREADLE_DEVICE static void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    simt::Mma16<kType == DType::kBF16>(d, a, b);
  }
  // The infinities and NaNs of a pair; zero in the place of the rest.
  TREADLE_DEVICE static uint32_t NotFinite(uint32_t pair) {
    constexpr uint32_t kLow = kType == DType::kF16 ? 0x7c00u : 0x7f80u;  // the exponent
    constexpr uint32_t kHigh = kLow << 16;
    const uint32_t low = (pair & kLow) == kLow ? 0xffffu : 0;
    const uint32_t high = (pair & kHigh) == kHigh ? 0xffff0000u : 0;
    return pair & (low | high);
  }
  TREADLE_DEVICE static uint32_t Pack(float low, float high) {
    return simt::Pack16(kType == DType::kBF16, low, high);
  }
  // Packs weights: within [0, 1], or NaN.
  TREADLE_DEVICE static uint32_t PackWeights(float low, float high) {
    if constexpr (kType == DType::kF16) {
      return simt::PackSmallF16(low, high);
    } else {
      return simt::PackBf16(low, high);
    }
  }
};

template <int kM, int kN>
struct SoftmaxState {
  float vector[kM][kN][4];
  float sum[kM][4];  // [1] and [3] repeat [0] and [2]
  float max[kM][2];  // of pairs g and g + 8

  TREADLE_DEVICE void Reset() {
    TREADLE_UNROLL
    for (int m = 0; m < kM; ++m) {
      ResetHalf(m, 0);
      ResetHalf(m, 1);
    }
  }
  // Takes in a block's maximum: what came before is scaled down. Returns what to subtract. All
  // lanes of a warp.
  TREADLE_DEVICE float Raise(int m, int half, float block_max) {
    const float before = max[m][half];
    const float now = simt::Max(block_max, before);
    const float shift = Shift(now);
    const float factor = Weight(before, shift);
    max[m][half] = now;
    // Most blocks of a long context raise nothing.
    if (kN >= 8 && simt::Ballot(factor != 1.0f) == 0) return shift;
    TREADLE_UNROLL
    for (int e = 2 * half; e < 2 * half + 2; ++e) {
      sum[m][e] *= factor;
      TREADLE_UNROLL
      for (int n = 0; n < kN; ++n) vector[m][n][e] *= factor;
    }
    return shift;
  }

  // -- splits -------------------------------------------------------------------------------------
  // A thread's memory of the splits before: kKept floats, kStride apart.
  static constexpr int kKept = kM * (2 * 2 + 4 * kN);

  // A split of pair (m, half) ends: it joins those before it (`first`: there are none), and the
  // next one begins.
  template <int kStride>
  TREADLE_DEVICE void EndSplit(int m, int half, bool first, float* kept) {
    float* at = kept + KeptBegin(m, half) * kStride;
    FoldFactors f = {max[m][half], 0.0f, 1.0f};
    if (!first) f = Factors(at[0], max[m][half]);
    at[0] = f.max;
    at[kStride] = first ? sum[m][2 * half] : Fold(at[kStride], sum[m][2 * half], f);
    TREADLE_UNROLL
    for (int n = 0; n < kN; ++n) {
      TREADLE_UNROLL
      for (int e = 0; e < 2; ++e) {
        float* element = at + (2 + 2 * n + e) * kStride;
        const float own = vector[m][n][2 * half + e];
        *element = first ? own : Fold(*element, own, f);
      }
    }
    ResetHalf(m, half);
  }
  // The last split of a pair that has several.
  template <int kStride>
  TREADLE_DEVICE void JoinKept(int m, int half, const float* kept) {
    const float* at = kept + KeptBegin(m, half) * kStride;
    const FoldFactors f = Factors(at[0], max[m][half]);
    max[m][half] = f.max;
    sum[m][2 * half] = Fold(at[kStride], sum[m][2 * half], f);
    TREADLE_UNROLL
    for (int n = 0; n < kN; ++n) {
      TREADLE_UNROLL
      for (int e = 0; e < 2; ++e) {
        float& own = vector[m][n][2 * half + e];
        own = Fold(at[(2 + 2 * n + e) * kStride], own, f);
      }
    }
  }

 private:
  TREADLE_DEVICE static int KeptBegin(int m, int half) { return (2 * m + half) * (2 + 2 * kN); }
  TREADLE_DEVICE void ResetHalf(int m, int half) {
    max[m][half] = -simt::Infinity();
    TREADLE_UNROLL
    for (int e = 2 * half; e < 2 * half + 2; ++e) {
      sum[m][e] = 0;
      TREADLE_UNROLL
      for (int n = 0; n < kN; ++n) vector[m][n][e] = 0;
    }
  }
};

// The larger of four neighbouring lanes' numbers: a row of fragment D.
TREADLE_DEVICE float QuadMax(float x) {
  TREADLE_UNROLL
  for (int mask = 1; mask <= 2; mask <<= 1) {
    x = simt::Max(simt::ShuffleXor(x, mask), x);
  }
  return x;
}

// Fragment A of features 16 k .. 16 k + 15 of two pairs' queries, scaled, then rounded. Null:
// zeros.
template <DType kType>
TREADLE_DEVICE void LoadQuery(const float* low, const float* high, int k, int head_dim, float scale,
                              uint32_t (&a)[4]) {
  TREADLE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float* from = i % 2 == 0 ? low : high;
    const int feature = 16 * k + 8 * (i / 2) + 2 * (simt::Lane() & 3);
    const bool valid = from != nullptr && feature < head_dim;
    a[i] = valid ? Element16<kType>::Pack(from[feature] * scale, from[feature + 1] * scale) : 0;
  }
}

// This lane's address for a LoadMatrix4 of rows [row, row + 16) and 16-bit columns [column,
// column + 16), rows row_bytes apart. kRowsFirst: the four matrices are upper left, lower left,
// upper right, lower right (fragment A; fragment B of two column groups, transposed); otherwise
// upper left, upper right, lower left, lower right (fragment B of two row groups).
template <bool kRowsFirst>
TREADLE_DEVICE const char* MatrixRow(const char* base, int row_bytes, int row, int column) {
  const int matrix = simt::Lane() / 8;
  const int down = kRowsFirst ? matrix % 2 : matrix / 2;
  const int right = kRowsFirst ? matrix / 2 : matrix % 2;
  return base + (row + 8 * down + simt::Lane() % 8) * row_bytes + 2 * (column + 8 * right);
}

}  // namespace treadle::cuda
