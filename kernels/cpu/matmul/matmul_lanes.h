// What the exact and the integer matrix kernels share: sums of R rows by G groups, and the
// epilogue.
//
// For sources that are compiled once per instruction set (see simd.h).
#pragma once

#include "kernels/cpu/matmul/matmul_kernels.h"
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

// Sums of rows [row, row + R) and groups [group, group + G), as they begin or go on.
template <int R, int G>
TREADLE_SIMD void BeginSums(bool first, const float* scratch, Vec (&sums)[R][G]) {
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) {
      sums[r][g] = first ? Zero() : Load(scratch + (r * G + g) * kLanes);
    }
  }
}

// Keeps the sums for the next tile, or writes the result: + bias, then + out if accumulate.
template <int R, int G>
TREADLE_SIMD void EndSums(bool last, const MatMulShare& share, int64_t row, int64_t group,
                          float* scratch, const Vec (&sums)[R][G]) {
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) {
      if (!last) {
        Store(scratch + (r * G + g) * kLanes, sums[r][g]);
        continue;
      }
      const int64_t feature = (group + g) * kGroupFeatures;
      const int64_t lanes = share.weight.n - feature < kLanes ? share.weight.n - feature : kLanes;
      float* out = share.out + (row + r) * share.out_stride + feature;
      Vec value = sums[r][g];
      if (share.bias != nullptr) value = Add(value, LoadLanes(share.bias + feature, lanes));
      if (share.accumulate) value = Add(value, LoadLanes(out, lanes));
      StoreLanes(out, value, lanes);
    }
  }
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
