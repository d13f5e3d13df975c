// Products with quantized activations (ComputeMode::kInt8 and kInt16): exact integer dots per block
// of 32, scaled and added in ascending order; kInt16's in spans (matmul_kernels.h).
//
// A 16-bit activation is 128 * high + low, both of them codes of 8 bits. So kInt16 is two planes of
// kInt8's dots, low (plane 0) and high, put together while they are integers.
//
// Few rows read the packed codes as they are, unpacked in registers, and stream weights. More rows
// run over a tile that was unpacked once, in L1: kInt8 over bytes, kInt16 over words
// (matmul_words.h).
//
// For sources that are compiled once per instruction set (see simd.h).
#pragma once

#include "kernels/cpu/matmul/block_layouts.h"
#include "kernels/cpu/matmul/matmul_lanes.h"
#include "kernels/cpu/matmul/matmul_words.h"

namespace treadle::TREADLE_ISA {
namespace {

constexpr int64_t kTileBlocks = 24;
constexpr int64_t kPrefetchBytes = 2048;
// How many rows stream weights, unpacking them for every few.
template <typename Layout, int P>
constexpr int64_t StreamedRows() {
  if (P == 1) return kWideRegisters ? 16 : 8;
  if (kWideRegisters) return Layout::kHalves ? 4 : 8;
  return Layout::kWide || Layout::kHalves ? 1 : 6;
}

// The work of a block of R rows and G groups, with activations in P planes.
struct Work : BlockRange {
  const uint8_t* weights;  // of block `begin` of the first group
  int64_t group_stride;    // bytes
  NextTile next;           // of what was unpacked
};

// Sum of the activations that share a scale.
template <typename Layout>
TREADLE_SIMD int32_t SumOf(const ActivationBlock& block, int half) {
  if (!Layout::kHalves) return block.low_sum + block.high_sum;
  return half == 0 ? block.low_sum : block.high_sum;
}

template <typename Layout, int P, int R, int G>
TREADLE_SIMD void AddHalf(const uint8_t* const (&w)[G], int64_t place, int half,
                          const ActivationBlock* blocks, int64_t stride,
                          const Dots<Layout::kWide> (&dots)[P][R][G], Vec (&sums)[R][G]) {
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    const Vec scale = Layout::Scale(w[g], place, half);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const ActivationBlock& block = blocks[r * stride];
      Integers dot =
          EndDots<Layout::kWide, Layout::kZero>(dots[0][r][g], SumOf<Layout>(block, half));
      if constexpr (P == 2) dot = Join(EndDots<Layout::kWide, 0>(dots[1][r][g], 0), dot);
      const Vec factor = P == 2 ? scale : Mul(scale, Broadcast(block.scale));
      sums[r][g] = Fma(ToFloat(dot), factor, sums[r][g]);
    }
  }
}

// Plane 0 accounts for the zero point of both.
template <typename Layout, int P, int R, int G>
TREADLE_SIMD void BeginBlock(const ActivationBlock* blocks, int64_t stride, int half,
                             Dots<Layout::kWide> (&dots)[P][R][G]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const int32_t sum = SumOf<Layout>(blocks[r * stride], half);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      dots[0][r][g] = BeginDots<Layout::kWide, Layout::kZero>(sum);
      if constexpr (P == 2) dots[1][r][g] = BeginDots<Layout::kWide, 0>(0);
    }
  }
}

template <typename Layout, int R, int G>
TREADLE_SIMD void AddOffsets(const uint8_t* const (&w)[G], int64_t place,
                             const ActivationBlock* blocks, int64_t stride, Vec (&sums)[R][G]) {
#pragma GCC unroll 2
  for (int part = 0; part < Layout::kOffsets; ++part) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const Vec offset = Layout::Offset(w[g], place, part);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float sum = ScaledSum<Layout::kOffsets>(blocks[r * stride], part);
        sums[r][g] = Fma(offset, Broadcast(sum), sums[r][g]);
      }
    }
  }
}

// Bytes of an activation in P planes.
template <int P>
constexpr int64_t kActivationBytes = P == 1 ? kInt8Bytes : kInt16Bytes;

template <typename Layout, int P, int R, int G>
TREADLE_LOOP void RunBlocks(const MatMulInput& input, const MatMulShare& share, const Work& work,
                            float* scratch) {
  constexpr bool kWide = Layout::kWide;
  const int64_t stride = input.k / kBlockValues;
  Vec sums[R][G];
  BeginSums<R, G>(work.first, scratch, sums);
  Vec span[R][G];  // of two planes
  BeginSums<R, G>(true, nullptr, span);
  int64_t span_end = SpanEnd(work.begin, work.end);
  const int64_t row_codes = kActivationBytes<P> * input.k;
  const int8_t* x =
      input.codes + work.row * row_codes + work.begin * kActivationBytes<P> * kBlockValues;
  const ActivationBlock* blocks = input.blocks + work.row * stride + work.begin;
  // With several groups side by side: the next set, which lies a whole set on.
  const int64_t ahead = G > 1 ? G * work.group_stride : kPrefetchBytes;
  // The first rows fetch; where as many follow, these fetch every other block.
  const int64_t turns = G > 1 && input.rows == 2 * R ? 2 : 1;
  const int64_t turn = work.row / R;
  const uint8_t* w[G];
  for (int g = 0; g < G; ++g) w[g] = work.weights + g * work.group_stride;
  for (int64_t b = work.begin; b < work.end; ++b) {
    const int64_t place = b % Layout::kBlocks;
    // Later rows find the weights in the cache.
    if (!Layout::kPacked && work.row == 0) work.next.template Fetch<G>(b - work.begin);
    if (Layout::kPacked && b % turns == turn) {
      constexpr int64_t kBlockBytes = Layout::kBytes / Layout::kBlocks;
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
#pragma GCC unroll 16
        for (int64_t line = 0; line < kBlockBytes; line += 64) {
          const uint8_t* p = w[g] + place * kBlockBytes + ahead + line;
          G > 1 ? FetchLater(p) : FetchSoon(p);
        }
      }
    }
    Dots<kWide> dots[P][R][G], upper[P][R][G];
    BeginBlock<Layout, P, R, G>(blocks, stride, 0, dots);
    if constexpr (Layout::kHalves) BeginBlock<Layout, P, R, G>(blocks, stride, 1, upper);
    ForFour([&]<int I>() __attribute__((always_inline)) {
      Codes<kWide> low[G], high[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) Layout::template Pair<I>(w[g], place, low[g], high[g]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
          const int8_t* codes = x + r * row_codes + p * kBlockValues + 4 * I;
          const Quad a = LoadQuad(codes);
          const Quad c = LoadQuad(codes + 16);
#pragma GCC unroll 8
          for (int g = 0; g < G; ++g) {
            dots[p][r][g] = AddDots(dots[p][r][g], low[g], a);
            Dots<kWide>& second = Layout::kHalves ? upper[p][r][g] : dots[p][r][g];
            second = AddDots(second, high[g], c);
          }
        }
      }
    });
    Vec(&scaled)[R][G] = P == 2 ? span : sums;
    AddHalf<Layout, P, R, G>(w, place, 0, blocks, stride, dots, scaled);
    if constexpr (Layout::kHalves)
      AddHalf<Layout, P, R, G>(w, place, 1, blocks, stride, upper, scaled);
    if constexpr (Layout::kOffsets > 0) {
      AddOffsets<Layout, R, G>(w, place, blocks, stride, sums);
    }
    if (P == 2 && b + 1 == span_end) {
      AddSpan(blocks, stride, span, sums);
      BeginSums<R, G>(true, nullptr, span);
      span_end = SpanEnd(span_end, work.end);
    }
    x += kActivationBytes<P> * kBlockValues;
    ++blocks;
    if (place == Layout::kBlocks - 1) {
      for (int g = 0; g < G; ++g) w[g] += Layout::kBytes;
    }
  }
  EndSums<R, G>(work.last, share, work.row, work.group, scratch, sums);
}

// As many rows as the registers hold.
template <typename Layout, int P>
constexpr int RowsAtOnce() {
  if (kWideRegisters) return P == 2 && Layout::kHalves ? 2 : 4;
  return (Layout::kWide && !TREADLE_BYTE_DOTS ? 2 : 4) / P;
}

// All rows over blocks [work.begin, work.end) of G groups.
template <typename Layout, int P, int G>
void RunRows(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
             Work work) {
  ForRows<RowsAtOnce<Layout, P>()>(input.rows, [&]<int R>(int64_t row) {
    work.row = row;
    RunBlocks<Layout, P, R, G>(input, share, work, scratch.sums + row * G * kLanes);
  });
}

template <typename Layout, int P>
void RunDirect(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  const PackedView& weight = share.weight;
  Work work{{0, input.k / kBlockValues, 0, 0, true, true}, nullptr, weight.group_bytes, {}};
  constexpr int kGroups = kWideRegisters ? 2 : 1;
  for (work.group = share.group_begin; work.group < share.group_end;) {
    work.weights = weight.data + work.group * weight.group_bytes;
    if (kGroups == 2 && input.rows > 1 && work.group + 2 <= share.group_end) {
      RunRows<Layout, P, kGroups>(input, share, scratch, work);
      work.group += kGroups;
    } else {
      RunRows<Layout, P, 1>(input, share, scratch, work);
      ++work.group;
    }
  }
}

// Runs the tiles of one plane.
template <typename Packed, int G>
void RunTiles(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
              int64_t group) {
  using Layout = TileLayout<Packed>;
  static_assert(G * kTileBlocks * Layout::kBytes <= kTileBytes);
  const int64_t blocks = input.k / kBlockValues;
  for (int64_t begin = 0; begin < blocks; begin += kTileBlocks) {
    const int64_t end = begin + kTileBlocks < blocks ? begin + kTileBlocks : blocks;
    for (int g = 0; g < G; ++g) {
      const uint8_t* packed = share.weight.data + (group + g) * share.weight.group_bytes;
      uint8_t* tile = scratch.tile + g * kTileBlocks * Layout::kBytes;
      for (int64_t b = begin; b < end; ++b, tile += Layout::kBytes) {
        UnpackBlock<Packed>(packed, b, tile);
      }
    }
    const Work work{{begin, end, 0, group, begin == 0, end == blocks},
                    scratch.tile,
                    kTileBlocks * Layout::kBytes,
                    NextTile::After(share.weight, group, G, end, blocks)};
    RunRows<Layout, 1, G>(input, share, scratch, work);
  }
}

template <typename Packed>
void RunTiled(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  int64_t group = share.group_begin;
  if (kWideRegisters) {
    for (; group + 2 <= share.group_end; group += 2) {
      RunTiles<Packed, 2>(input, share, scratch, group);
    }
  }
  for (; group < share.group_end; ++group) RunTiles<Packed, 1>(input, share, scratch, group);
}

template <typename Packed, int P>
void RunPlanes(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  constexpr int64_t kFewRows = StreamedRows<Packed, P>();
  if (input.rows <= kFewRows) return RunDirect<Packed, P>(input, share, scratch);
  if constexpr (P == 1) {
    RunTiled<Packed>(input, share, scratch);
  } else {
    RunWords<Packed>(input, share, scratch, UnpackWords<Packed>);
  }
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
