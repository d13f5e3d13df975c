// The common part of the dense family's 16-bit kernels: how 16 bytes of weights and of activations
// become two matrix instructions. Device code.
#pragma once

#include "kernels/cuda/dense/dense_kernels.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {

// d[16 features, 8 rows] += 32 elements of k. low, high: this lane's 8 elements of features g and
// g + 8; b: of row g.
template <bool kBf16>
TREADLE_DEVICE void DenseMma(float (&d)[4], const simt::Words4& low, const simt::Words4& high,
                             const simt::Words4& b) {
  const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
  const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
  const uint32_t b0[2] = {b.x, b.y};
  const uint32_t b1[2] = {b.z, b.w};
  simt::Mma16<kBf16>(d, a0, b0);
  simt::Mma16<kBf16>(d, a1, b1);
}

}  // namespace treadle::cuda
