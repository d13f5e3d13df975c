// How a lane of the few-rows kernel reads activations: the B fragments of a step's four products.
// Device code.
#pragma once

#include "kernels/cuda/low_bit/low_bit_constants.h"
#include "kernels/cuda/low_bit/low_bit_few.h"

namespace treadle::cuda::low_bit {

// x of a lane's row at one step, as it lies in memory: words 2j and 2j + 1 are the B fragment of
// product j.
struct RawX {
  uint32_t words[8];
};

template <int kGranule>
TREADLE_DEVICE void LoadX(const uint16_t* x, RawX& raw) {
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

// This lane's row of each tile of a block. Lanes of rows that do not exist read the last one, and
// nobody reads their sums.
template <int kGranule, int kTiles>
struct LaneX {
  const uint16_t* rows[kTiles];  // at this lane's first column
  RawX raw[kTiles];

  TREADLE_DEVICE LaneX(const FewRowsParams& p, int first_row) : raw{} {
    TREADLE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = first_row + tile * kTileRows + simt::Lane() / 4;
      rows[tile] = p.x + (row < p.rows ? row : p.rows - 1) * p.stride +
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
  TREADLE_DEVICE void Fragments(uint32_t (&b)[kTiles][4][2]) const {
    TREADLE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      TREADLE_UNROLL
      for (int i = 0; i < 8; ++i) b[tile][i / 2][i % 2] = raw[tile].words[i];
    }
  }
};

}  // namespace treadle::cuda::low_bit
