// How a lane of the few-rows kernel reads activations: the B fragments of a step's four products.
// Device code.
#pragma once

#include "kernels/cuda/low_bit_constants.h"
#include "kernels/cuda/low_bit_few.h"

namespace treadle::cuda::low_bit {

// x of a lane's row at one step, as it lies in memory: for product j, words 2j and 2j + 1 of
// numbers that are already rounded, or words 4j to 4j + 3 of floats.
template <typename X>
struct RawX {
  uint32_t words[sizeof(X) * 4];
};

template <int kGranule>
TREADLE_DEVICE void LoadX(const uint16_t* x, RawX<uint16_t>& raw) {
  constexpr bool kNarrow = kGranule == 16;  // four columns of a product at once, else of two
  TREADLE_UNROLL
  for (int j = 0; j < 4; j += kNarrow ? 1 : 2) {
    const uint16_t* from = x + ColumnOf(kGranule, j, 0, 0);
    if constexpr (kNarrow) {
      const auto words = *reinterpret_cast<const simt::Words2*>(from);
      raw.words[2 * j] = words.x;
      raw.words[2 * j + 1] = words.y;
    } else {
      const auto words = *reinterpret_cast<const simt::Words4*>(from);
      TREADLE_UNROLL
      for (int i = 0; i < 4; ++i) raw.words[2 * j + i] = WordOf(words, i);
    }
  }
}
template <int kGranule>
TREADLE_DEVICE void LoadX(const float* x, RawX<float>& raw) {
  TREADLE_UNROLL
  for (int j = 0; j < 4; ++j) {
    const auto words = *reinterpret_cast<const simt::Words4*>(x + ColumnOf(kGranule, j, 0, 0));
    TREADLE_UNROLL
    for (int i = 0; i < 4; ++i) raw.words[4 * j + i] = WordOf(words, i);
  }
}

// The B fragments of the four products.
template <bool kBf16>
TREADLE_DEVICE void ToFragments(const RawX<uint16_t>& raw, uint32_t (&b)[4][2]) {
  TREADLE_UNROLL
  for (int i = 0; i < 8; ++i) b[i / 2][i % 2] = raw.words[i];
}
template <bool kBf16>
TREADLE_DEVICE void ToFragments(const RawX<float>& raw, uint32_t (&b)[4][2]) {
  TREADLE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const float low = simt::AsFloat(raw.words[2 * i]);
    const float high = simt::AsFloat(raw.words[2 * i + 1]);
    b[i / 2][i % 2] = kBf16 ? simt::PackBf16(low, high) : simt::PackF16(low, high);
  }
}

// This lane's row of each tile of a block. Lanes of rows that do not exist read the last one, and
// nobody reads their sums.
template <int kGranule, int kTiles, typename X>
struct LaneX {
  const X* rows[kTiles];  // at this lane's first column
  RawX<X> raw[kTiles];

  TREADLE_DEVICE LaneX(const FewRowsParams& p, int first_row) : raw{} {
    TREADLE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = first_row + tile * kTileRows + simt::Lane() / 4;
      rows[tile] = static_cast<const X*>(p.x) + (row < p.rows ? row : p.rows - 1) * p.stride +
                   ColumnOf(kGranule, 0, simt::Lane() % 4, 0);
    }
  }
  TREADLE_DEVICE void Load(int step) {
    TREADLE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      LoadX<kGranule>(rows[tile] + step * kStepColumns, raw[tile]);
    }
  }
  // What was loaded last.
  template <bool kBf16>
  TREADLE_DEVICE void Fragments(uint32_t (&b)[kTiles][4][2]) const {
    TREADLE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) ToFragments<kBf16>(raw[tile], b[tile]);
  }
};

}  // namespace treadle::cuda::low_bit
