// Products with 16-bit activations as they are, times codes of 16 bits (ComputeMode::kInt16): the
// exact sums of matmul_blocks.h in half the instructions where bytes are split (AVX2's codes above
// 15), and the only ones for codes above 255.
//
// All rows run over a tile of 16-bit codes that was unpacked once, in L1. A dword holds two codes
// of a feature: of four consecutive k, first the even two, then the odd two.
//
// For sources that are compiled once per instruction set (see simd.h).
#pragma once

#include "kernels/cpu/block_layouts.h"
#include "kernels/cpu/matmul_lanes.h"
#include "kernels/cpu/matmul_tables.h"

namespace treadle::TREADLE_ISA {
namespace {

constexpr int64_t kWordTileBlocks = 12;
constexpr int64_t kWordBytes = 1024;  // of a tile's block: its codes
// f32 scale[16], and another or offset[16].
constexpr int64_t kWordBlockBytes = kWordBytes + 128;

#ifdef __AVX512F__
TREADLE_SIMD Integers BroadcastWords(int32_t x) { return {_mm512_set1_epi32(x)}; }
TREADLE_SIMD Integers AddWords(Integers sums, const uint8_t* codes, Quad x) {
  return {_mm512_dpwssd_epi32(sums.v, _mm512_loadu_si512(codes), x.v)};
}
constexpr int kWordRows = 6;
constexpr int kWordGroups = 2;
#else
TREADLE_SIMD Integers BroadcastWords(int32_t x) {
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
TREADLE_SIMD Integers AddWords(Integers sums, const uint8_t* codes, Quad x) {
  return {_mm256_add_epi32(sums.lo, _mm256_madd_epi16(LoadBytes(codes), x.v)),
          _mm256_add_epi32(sums.hi, _mm256_madd_epi16(LoadBytes(codes + 32), x.v))};
}
// Bytes that are codes, to the tile.
TREADLE_SIMD void StoreWordHalf(uint8_t* tile, __m256i bytes) {
  StoreBytes(tile, _mm256_and_si256(bytes, _mm256_set1_epi16(255)));
  StoreBytes(tile + 64, _mm256_srli_epi16(bytes, 8));
}
TREADLE_SIMD void StoreWords(uint8_t* tile, Codes<false> codes) {
  StoreWordHalf(tile, codes.lo);
  StoreWordHalf(tile + 32, codes.hi);
}
TREADLE_SIMD void StoreWords(uint8_t* tile, Codes<true> codes) {
  StoreWordHalf(tile, _mm256_or_si256(codes.lo, _mm256_slli_epi16(codes.upper_lo, 4)));
  StoreWordHalf(tile + 32, _mm256_or_si256(codes.hi, _mm256_slli_epi16(codes.upper_hi, 4)));
}
constexpr int kWordRows = 4;
constexpr int kWordGroups = 1;
#endif

// Blocks [begin, end) of a tile.
struct WordWork {
  const uint8_t* tile;
  int64_t begin;
  int64_t end;
  int64_t row;
  int64_t group;
  bool first;
  bool last;
};

// Layout: kZero, kHalves and kOffset of block_layouts.h.
template <typename Layout, int R, int G>
TREADLE_LOOP void RunWordRows(const MatMulInput& input, const MatMulShare& share,
                              const WordWork& work, float* scratch) {
  const int64_t stride = input.k / kBlockValues;
  const int64_t row_bytes = kInt16Bytes * input.k;
  const int8_t* x =
      input.codes + work.row * row_bytes + work.begin * kInt16Bytes * kBlockValues + kWordsAt;
  const ActivationBlock* blocks = input.blocks + work.row * stride + work.begin;
  const uint8_t* w = work.tile;
  Vec sums[R][G];
  BeginSums<R, G>(work.first, scratch, sums);
  for (int64_t b = work.begin; b < work.end; ++b) {
    constexpr int kParts = Layout::kHalves ? 2 : 1;
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Integers dots[R][G];
      for (int r = 0; r < R; ++r) {
        const ActivationBlock& block = blocks[r * stride];
        const int32_t sum = !Layout::kHalves ? block.low_sum + block.high_sum
                            : part == 0      ? block.low_sum
                                             : block.high_sum;
        for (int g = 0; g < G; ++g) dots[r][g] = BroadcastWords(-Layout::kZero * sum);
      }
      constexpr int kDwords = 16 / kParts;
#pragma GCC unroll 4
      for (int i = part * kDwords; i < (part + 1) * kDwords; ++i) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Quad activations = LoadQuad(x + r * row_bytes + 4 * i);
#pragma GCC unroll 2
          for (int g = 0; g < G; ++g) {
            const uint8_t* codes = w + g * kWordTileBlocks * kWordBlockBytes + 64 * i;
            dots[r][g] = AddWords(dots[r][g], codes, activations);
          }
        }
      }
      for (int g = 0; g < G; ++g) {
        const uint8_t* constants = w + g * kWordTileBlocks * kWordBlockBytes + kWordBytes;
        const Vec scale = Load(Floats(constants + 64 * part));
        for (int r = 0; r < R; ++r) {
          const Vec factor = Mul(scale, Broadcast(blocks[r * stride].scale));
          sums[r][g] = Fma(ToFloat(dots[r][g]), factor, sums[r][g]);
        }
      }
    }
    if constexpr (Layout::kOffset) {
      for (int g = 0; g < G; ++g) {
        const Vec offset =
            Load(Floats(w + g * kWordTileBlocks * kWordBlockBytes + kWordBytes + 64));
        for (int r = 0; r < R; ++r) {
          sums[r][g] = Fma(offset, Broadcast(blocks[r * stride].scaled_sum), sums[r][g]);
        }
      }
    }
    x += kInt16Bytes * kBlockValues;
    ++blocks;
    w += kWordBlockBytes;
  }
  EndSums<R, G>(work.last, share, work.row, work.group, scratch, sums);
}

// unpack(group, block, tile): one block of 32 k.
template <typename Layout, int G, typename Unpack>
TREADLE_SIMD void RunWordGroups(const MatMulInput& input, const MatMulShare& share,
                                const MatMulScratch& scratch, int64_t group, Unpack unpack) {
  static_assert(G * kWordTileBlocks * kWordBlockBytes <= kTileBytes);
  const int64_t blocks = input.k / kBlockValues;
  for (int64_t begin = 0; begin < blocks; begin += kWordTileBlocks) {
    const int64_t end = begin + kWordTileBlocks < blocks ? begin + kWordTileBlocks : blocks;
    for (int g = 0; g < G; ++g) {
      const uint8_t* packed = share.weight.data + (group + g) * share.weight.group_bytes;
      uint8_t* tile = scratch.tile + g * kWordTileBlocks * kWordBlockBytes;
      for (int64_t b = begin; b < end; ++b, tile += kWordBlockBytes) unpack(packed, b, tile);
    }
    WordWork work{scratch.tile, begin, end, 0, group, begin == 0, end == blocks};
    const auto sums = [&] { return scratch.sums + work.row * G * kLanes; };
    for (; work.row + kWordRows <= input.rows; work.row += kWordRows) {
      RunWordRows<Layout, kWordRows, G>(input, share, work, sums());
    }
    for (; work.row + 2 <= input.rows; work.row += 2) {
      RunWordRows<Layout, 2, G>(input, share, work, sums());
    }
    if (work.row < input.rows) RunWordRows<Layout, 1, G>(input, share, work, sums());
  }
}

template <typename Layout, typename Unpack>
TREADLE_SIMD void RunWords(const MatMulInput& input, const MatMulShare& share,
                           const MatMulScratch& scratch, Unpack unpack) {
  int64_t group = share.group_begin;
  for (; group + kWordGroups <= share.group_end; group += kWordGroups) {
    RunWordGroups<Layout, kWordGroups>(input, share, scratch, group, unpack);
  }
  if constexpr (kWordGroups > 1) {
    for (; group < share.group_end; ++group) {
      RunWordGroups<Layout, 1>(input, share, scratch, group, unpack);
    }
  }
}

#ifndef __AVX512F__

// Block `block` of a group of GGUF's layouts to a tile.
template <typename Packed>
inline void UnpackWords(const uint8_t* group, int64_t block, uint8_t* tile) {
  UnpackBlockWith<Packed, 128>(group, block, tile,
                               [](uint8_t* p, auto codes) { StoreWords(p, codes); });
}

#endif

}  // namespace
}  // namespace treadle::TREADLE_ISA
