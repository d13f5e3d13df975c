// Products with 16-bit activations as they are, times codes of 16 bits (ComputeMode::kInt16): the
// exact sums of matmul_blocks.h in fewer instructions (nothing is split and put together), and the
// only ones for codes above 255.
//
// All rows run over a tile of 16-bit codes that was unpacked once, in L1. A dword holds two codes
// of a feature: of four consecutive k, first the even two, then the odd two.
//
// For sources that are compiled once per instruction set (see simd.h).
#pragma once

#include "kernels/cpu/matmul/block_layouts.h"
#include "kernels/cpu/matmul/code_words.h"
#include "kernels/cpu/matmul/matmul_lanes.h"

namespace treadle::TREADLE_ISA {
namespace {

constexpr int64_t kWordTileBlocks = kMaxSpanBlocks;  // a tile has the blocks of a span
constexpr int64_t kWordBytes = 1024;                 // of a tile's block: its codes
// f32 scale[16], perhaps another, and as many offset[16] as the layout has.
template <typename Layout>
constexpr int64_t kWordBlockBytes = kWordBytes +
                                    64 * ((Layout::kHalves ? 2 : 1) + Layout::kOffsets);

#ifdef __AVX512F__
constexpr int kWordRows = 8;
constexpr int kWordGroups = 2;
#else
constexpr int kWordRows = 4;
constexpr int kWordGroups = 1;
#endif

// The factor of minimum `part` of a block, which has one minimum, or one for each half.
template <int kOffsets>
TREADLE_SIMD float ScaledSum(const ActivationBlock& block, int part) {
  if (kOffsets < 2) return block.scaled_sum;
  return block.scale * static_cast<float>(part == 0 ? block.low_sum : block.high_sum);
}

// The work of one tile.
struct WordWork : BlockRange {
  const uint8_t* tile;
  NextTile next;
};

// Layout: kZero, kHalves and kOffsets of block_layouts.h.
template <typename Layout, int R, int G>
TREADLE_LOOP void RunWordRows(const MatMulInput& input, const MatMulShare& share,
                              const WordWork& work, float* scratch) {
  const int64_t stride = input.k / kBlockValues;
  const int64_t row_bytes = kInt16Bytes * input.k;
  const int8_t* x =
      input.codes + work.row * row_bytes + work.begin * kInt16Bytes * kBlockValues + kWordsAt;
  const ActivationBlock* blocks = input.blocks + work.row * stride + work.begin;
  const uint8_t* w = work.tile;
  constexpr int kParts = Layout::kHalves ? 2 : 1;
  Vec span[R][G];
  BeginSums<R, G>(true, nullptr, span);
  for (int64_t b = work.begin; b < work.end; ++b) {
    if (work.row == 0) work.next.template Fetch<G>(b - work.begin);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Integers dots[R][G];
      for (int r = 0; r < R; ++r) {
        const ActivationBlock& block = blocks[r * stride + b - work.begin];
        const int32_t sum = !Layout::kHalves ? block.low_sum + block.high_sum
                            : part == 0      ? block.low_sum
                                             : block.high_sum;
        for (int g = 0; g < G; ++g) dots[r][g] = BroadcastWords(-Layout::kZero * sum);
      }
      // All of it: going round, the compiler copies every sum.
      constexpr int kDwords = 16 / kParts;
#pragma GCC unroll 16
      for (int i = 0; i < kDwords; ++i) {
        const int dword = part * kDwords + i;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Quad activations = LoadQuad(x + r * row_bytes + 4 * dword);
#pragma GCC unroll 2
          for (int g = 0; g < G; ++g) {
            const uint8_t* codes = w + g * kWordTileBlocks * kWordBlockBytes<Layout> + 64 * dword;
            dots[r][g] = AddWords(dots[r][g], codes, activations);
          }
        }
      }
      for (int g = 0; g < G; ++g) {
        const uint8_t* constants = w + g * kWordTileBlocks * kWordBlockBytes<Layout> + kWordBytes;
        const Vec scale = Load(Floats(constants + 64 * part));
        for (int r = 0; r < R; ++r) span[r][g] = Fma(ToFloat(dots[r][g]), scale, span[r][g]);
      }
    }
    x += kInt16Bytes * kBlockValues;
    w += kWordBlockBytes<Layout>;
  }
  Vec sums[R][G];
  BeginSums<R, G>(work.first, scratch, sums);
  const uint8_t* constants = work.tile + kWordBytes;
  for (int64_t b = 0; b < work.end - work.begin; ++b, constants += kWordBlockBytes<Layout>) {
    for (int part = 0; part < Layout::kOffsets; ++part) {
      for (int g = 0; g < G; ++g) {
        const Vec offset = Load(Floats(constants + g * kWordTileBlocks * kWordBlockBytes<Layout> +
                                       64 * (kParts + part)));
        for (int r = 0; r < R; ++r) {
          const float sum = ScaledSum<Layout::kOffsets>(blocks[r * stride + b], part);
          sums[r][g] = Fma(offset, Broadcast(sum), sums[r][g]);
        }
      }
    }
  }
  AddSpan(blocks, stride, span, sums);
  EndSums<R, G>(work.last, share, work.row, work.group, scratch, sums);
}

// unpack(group, block, tile): one block of 32 k.
template <typename Layout, int G, typename Unpack>
TREADLE_SIMD void RunWordGroups(const MatMulInput& input, const MatMulShare& share,
                                const MatMulScratch& scratch, int64_t group, Unpack unpack) {
  static_assert(G * kWordTileBlocks * kWordBlockBytes<Layout> <= kTileBytes);
  const int64_t blocks = input.k / kBlockValues;
  for (int64_t begin = 0, end; begin < blocks; begin = end) {
    end = SpanEnd(begin, blocks);
    for (int g = 0; g < G; ++g) {
      const uint8_t* packed = share.weight.data + (group + g) * share.weight.group_bytes;
      uint8_t* tile = scratch.tile + g * kWordTileBlocks * kWordBlockBytes<Layout>;
      for (int64_t b = begin; b < end; ++b, tile += kWordBlockBytes<Layout>)
        unpack(packed, b, tile);
    }
    WordWork work{{begin, end, 0, group, begin == 0, end == blocks},
                  scratch.tile,
                  NextTile::After(share.weight, group, G, end, blocks)};
    ForRows<kWordRows>(input.rows, [&]<int R>(int64_t row) {
      work.row = row;
      RunWordRows<Layout, R, G>(input, share, work, scratch.sums + row * G * kLanes);
    });
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

// Block `block` of a group of GGUF's layouts to a tile.
template <typename Packed>
inline void UnpackWords(const uint8_t* group, int64_t block, uint8_t* tile) {
  UnpackBlockWith<Packed, 128>(group, block, tile,
                               [](uint8_t* p, auto codes) { StoreWords(p, WordsOf(codes)); });
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
