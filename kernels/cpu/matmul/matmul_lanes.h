// Shared by the matrix kernels of one instruction set: each other's functions, sums of R rows by G
// groups, and the epilogue.
//
// For sources that are compiled once per instruction set (see simd.h).
#pragma once

#include "kernels/cpu/matmul/matmul_kernels.h"
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {

// Part of MatMulInt16: layouts with HasCodes.
MatMulFunction MatMulCodebook;
// A block of 32 activations of kInt16: its planes (low, high), then, from byte kWordsAt, the 16-bit
// activations themselves, of four consecutive k the even ones before the odd ones.
inline constexpr int64_t kWordsAt = 2 * kBlockValues;
// In float, for a few rows: false if there is no such kernel for the layout.
bool MatMulDirect(const MatMulInput& input, const MatMulShare& share);
inline constexpr int64_t kDirectRows = 8;
// kRowInt8, the same in every mode.
MatMulFunction MatMulRowInt8;
// The codes of one activation. Without dots of bytes they are words: of four consecutive k the even
// ones before the odd ones.
inline constexpr int kRowBytes = TREADLE_BYTE_DOTS ? kRowBytesVnni : kRowBytesAvx2;

namespace {

// The part of a product that a loop computes: blocks [begin, end) of k for rows from `row` on and
// groups from `group` on; whether these are the first, and the last, of all blocks.
struct BlockRange {
  int64_t begin;
  int64_t end;
  int64_t row;
  int64_t group;
  bool first;
  bool last;
};

// The packed weights of the tile after this one: its first group's, others `stride` apart, and the
// bytes of a block.
struct NextTile {
  const uint8_t* weights;
  int64_t stride;
  int64_t block_bytes;

  // The one after blocks up to `end`, of `blocks`, of some groups.
  TREADLE_SIMD static NextTile After(const PackedView& weight, int64_t group, int groups,
                                     int64_t end, int64_t blocks) {
    const int64_t bytes = weight.group_bytes / blocks;
    const int64_t ahead = end < blocks ? end * bytes : groups * weight.group_bytes;
    return {weight.data + group * weight.group_bytes + ahead, weight.group_bytes, bytes};
  }
  // Fetches block `block` of G groups.
  template <int G>
  TREADLE_SIMD void Fetch(int64_t block) const {
    const uint8_t* p = weights + block * block_bytes;
    for (int g = 0; g < G; ++g, p += stride) {
      for (int64_t line = 0; line < block_bytes; line += 64) FetchLater(p + line);
    }
  }
};

// Calls body.template operator()<R>(row) for all of `rows` rows: R = kRows as long as there are so
// many, then 4, 2 and 1.
template <int kRows, typename Body>
inline void ForRows(int64_t rows, Body body) {
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) body.template operator()<kRows>(row);
  if constexpr (kRows > 4) {
    for (; row + 4 <= rows; row += 4) body.template operator()<4>(row);
  }
  if constexpr (kRows > 2) {
    for (; row + 2 <= rows; row += 2) body.template operator()<2>(row);
  }
  if constexpr (kRows > 1) {
    for (; row < rows; ++row) body.template operator()<1>(row);
  }
}

// Sums of rows [row, row + R) and groups [group, group + G), as they begin or go on.
template <int R, int G>
TREADLE_SIMD void BeginSums(bool first, const float* scratch, Vec (&sums)[R][G]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) {
      sums[r][g] = first ? Zero() : Load(scratch + (r * G + g) * kLanes);
    }
  }
}

// Adds what a span gave, in units of the rows' scales. blocks: the first row's first of the span,
// others `stride` apart.
template <int R, int G>
TREADLE_SIMD void AddSpan(const ActivationBlock* blocks, int64_t stride, const Vec (&span)[R][G],
                          Vec (&sums)[R][G]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Vec scale = Broadcast(blocks[r * stride].scale);
    for (int g = 0; g < G; ++g) sums[r][g] = Fma(span[r][g], scale, sums[r][g]);
  }
}

// Keeps the sums for the next tile, or writes the results of rows from `first` to before `end`: +
// bias, then + out if accumulate.
template <int R, int G>
TREADLE_SIMD void EndSums(bool last, const MatMulShare& share, int64_t row, int64_t group,
                          float* scratch, const Vec (&sums)[R][G], int64_t first = 0,
                          int64_t end = R) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) {
      if (!last) {
        Store(scratch + (r * G + g) * kLanes, sums[r][g]);
        continue;
      }
      if (r < first || r >= end) continue;
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
