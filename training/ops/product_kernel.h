// The one product of floats that gradients are made of, inlined into vector sources (simd.h).
//
// c[i][j] += sum over ascending t of a(i, t) * b[t][j], each a chain of fma from what c holds, so
// that no cut along any side changes a bit. a(i, t) = a[i * a_row + t * a_step]: a matrix, or a
// transposed one.
#pragma once

#include "training/ops/gradient_kernels.h"
#ifdef TREADLE_ISA
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

// R rows and G groups of 16 columns at once; the last group has `lanes`.
template <int R, int G>
TREADLE_LOOP void AddProductBlock(const ProductArguments& p, int64_t i, int64_t j, int64_t lanes) {
  Vec sums[R][G];
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) {
      sums[r][g] =
          LoadLanes(p.c + (i + r) * p.c_stride + j + g * kLanes, g + 1 < G ? kLanes : lanes);
    }
  }
  const float* a = p.a + i * p.a_row;
  const float* b = p.b + j;
  for (int64_t t = 0; t < p.k; ++t, a += p.a_step, b += p.b_stride) {
    Vec right[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      right[g] = G == 1 ? LoadLanes(b, lanes) : Load(b + g * kLanes);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Vec left = Broadcast(a[r * p.a_row]);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[r][g] = Fma(left, right[g], sums[r][g]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) {
      StoreLanes(p.c + (i + r) * p.c_stride + j + g * kLanes, sums[r][g],
                 g + 1 < G ? kLanes : lanes);
    }
  }
}

template <int G>
void AddProductColumns(const ProductArguments& p, int64_t j, int64_t lanes) {
  constexpr int kRows = kWideRegisters ? 12 : (G >= 2 ? 3 : 6);
  int64_t i = 0;
  for (; i + kRows <= p.m; i += kRows) AddProductBlock<kRows, G>(p, i, j, lanes);
  for (; i + 4 <= p.m; i += 4) AddProductBlock<4, G>(p, i, j, lanes);
  for (; i < p.m; ++i) AddProductBlock<1, G>(p, i, j, lanes);
}

inline void AddProduct(const ProductArguments& p) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= p.n; j += 2 * kLanes) AddProductColumns<2>(p, j, kLanes);
  for (; j < p.n; j += kLanes) {
    AddProductColumns<1>(p, j, p.n - j < kLanes ? p.n - j : kLanes);
  }
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
#endif
