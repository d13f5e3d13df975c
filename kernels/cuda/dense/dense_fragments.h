// What the 16-bit kernels of the dense family share: how 16 bytes of weights and of activations
// become two matrix instructions, and which projection a tile is of. Device code.
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
  if constexpr (kBf16) {
    simt::MmaBf16(d, a0, b0);
    simt::MmaBf16(d, a1, b1);
  } else {
    simt::MmaF16(d, a0, b0);
    simt::MmaF16(d, a1, b1);
  }
}

// The projection that tile `tile` is of.
TREADLE_DEVICE DenseSegment DenseSegmentOf(const DenseProduct& p, int tile) {
  DenseSegment segment = p.segments[0];
  TREADLE_UNROLL
  for (int i = 1; i < kMaxSegments; ++i) {
    if (i < p.num_segments && tile >= p.segments[i].first_tile) segment = p.segments[i];
  }
  return segment;
}

// Gives every segment its tiles of `width` features; returns how many there are.
inline int32_t NumberTiles(DenseProduct& product, int width) {
  int32_t tiles = 0;
  for (int i = 0; i < product.num_segments; ++i) {
    product.segments[i].first_tile = tiles;
    tiles += (product.segments[i].n + width - 1) / width;
  }
  return tiles;
}

}  // namespace treadle::cuda
