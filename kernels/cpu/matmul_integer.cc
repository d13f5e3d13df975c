// Products with quantized activations (ComputeMode::kInt8 and kInt16): exact integer dots per block
// of 32, scaled and added in ascending order.
//
// A 16-bit activation is 128 * high + low, both of them codes of 8 bits. So kInt16 is two planes of
// kInt8's dots, low (plane 0) and high, put together while they are integers.
//
// Up to kDirectRows rows read the packed codes as they are, nibbles unpacked in registers, and
// stream weights. More rows run over a tile of bytes that was unpacked once, in L1.
#include "kernels/cpu/int8_lanes.h"
#include "kernels/cpu/matmul_lanes.h"
#include "kernels/cpu/matmul_tables.h"

namespace treadle::TREADLE_ISA {
namespace {

constexpr int64_t kDirectRows = 8;
constexpr int64_t kTileBlocks = 24;
constexpr int64_t kPrefetchBytes = 2048;

TREADLE_SIMD const uint16_t* Halves(const uint8_t* p) {
  return reinterpret_cast<const uint16_t*>(p);
}
TREADLE_SIMD const float* Floats(const uint8_t* p) { return reinterpret_cast<const float*>(p); }

// Layouts: how a block of 32 k x 16 features lies in memory. kBytes from block to block; codes are
// code + kZero; kHalves: one scale per 16 k instead of 32; kOffset: the format has minima.

template <bool kMinimum>
struct NibbleLayout {
  static constexpr int64_t kBytes = kMinimum ? 320 : 288;
  static constexpr int kZero = kMinimum ? 0 : 8;
  static constexpr bool kWide = false, kHalves = false, kOffset = kMinimum, kPacked = true;
  // Codes of dwords i (low) and i + 4 (high).
  TREADLE_SIMD static void Pair(const uint8_t* p, int i, Codes<false>& low, Codes<false>& high) {
    LoadNibbles(p + 64 * i, low, high);
  }
  TREADLE_SIMD static Vec Scale(const uint8_t* p, int) { return Load(Halves(p + 256)); }
  TREADLE_SIMD static Vec Offset(const uint8_t* p) { return Load(Halves(p + 288)); }
};

struct ByteLayout {
  static constexpr int64_t kBytes = 544;
  static constexpr int kZero = 128;
  static constexpr bool kWide = true, kHalves = false, kOffset = false, kPacked = true;
  TREADLE_SIMD static void Pair(const uint8_t* p, int i, Codes<true>& low, Codes<true>& high) {
    low = LoadCodes<true>(p + 64 * i);
    high = LoadCodes<true>(p + 64 * (i + 4));
  }
  TREADLE_SIMD static Vec Scale(const uint8_t* p, int) { return Load(Halves(p + 512)); }
  TREADLE_SIMD static Vec Offset(const uint8_t*) { return Zero(); }
};

// Unpacked: 8 x 16 dwords, f32 scale[16] (two of them if kHalves), f32 offset[16].
template <int kZeroPoint, bool kMinimum, bool kTwoScales>
struct TileLayout {
  static constexpr int64_t kBytes = 512 + 64 + (kMinimum || kTwoScales ? 64 : 0);
  static constexpr int kZero = kZeroPoint;
  static constexpr bool kWide = kZeroPoint > 8, kHalves = kTwoScales, kOffset = kMinimum;
  static constexpr bool kPacked = false;
  TREADLE_SIMD static void Pair(const uint8_t* p, int i, Codes<kWide>& low, Codes<kWide>& high) {
    low = LoadCodes<kWide>(p + 64 * i);
    high = LoadCodes<kWide>(p + 64 * (i + 4));
  }
  TREADLE_SIMD static Vec Scale(const uint8_t* p, int half) {
    return Load(Floats(p + 512 + 64 * half));
  }
  TREADLE_SIMD static Vec Offset(const uint8_t* p) { return Load(Floats(p + 576)); }
};

// Blocks [begin, end) of R rows and G groups, of activations in P planes.
struct Work {
  const uint8_t* weights;  // of block `begin` of the first group
  int64_t group_stride;    // bytes
  int64_t begin;
  int64_t end;
  int64_t row;
  int64_t group;
  bool first;
  bool last;
};

// Sum of the activations that share a scale.
template <typename Layout>
TREADLE_SIMD int32_t SumOf(const ActivationBlock& block, int half) {
  if (!Layout::kHalves) return block.low_sum + block.high_sum;
  return half == 0 ? block.low_sum : block.high_sum;
}

template <typename Layout, int P, int R, int G>
TREADLE_SIMD void AddHalf(const uint8_t* const (&w)[G], int half, const ActivationBlock* blocks,
                          int64_t stride, const Dots<Layout::kWide> (&dots)[P][R][G],
                          Vec (&sums)[R][G]) {
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    const Vec scale = Layout::Scale(w[g], half);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const ActivationBlock& block = blocks[r * stride];
      Integers dot =
          EndDots<Layout::kWide, Layout::kZero>(dots[0][r][g], SumOf<Layout>(block, half));
      if constexpr (P == 2) dot = Join(EndDots<Layout::kWide, 0>(dots[1][r][g], 0), dot);
      sums[r][g] = Fma(ToFloat(dot), Mul(scale, Broadcast(block.scale)), sums[r][g]);
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

template <typename Layout, int P, int R, int G>
void RunBlocks(const MatMulInput& input, const MatMulShare& share, const Work& work,
               float* scratch) {
  constexpr bool kWide = Layout::kWide;
  const int64_t stride = input.k / kBlockValues;
  Vec sums[R][G];
  BeginSums<R, G>(work.first, scratch, sums);
  const int64_t row_codes = P * input.k;
  const int8_t* x = input.codes + work.row * row_codes + work.begin * P * kBlockValues;
  const ActivationBlock* blocks = input.blocks + work.row * stride + work.begin;
  // Of several groups side by side: the next set, which lies a whole set on.
  const int64_t ahead = G > 1 ? G * work.group_stride : kPrefetchBytes;
  const uint8_t* w[G];
  for (int g = 0; g < G; ++g) w[g] = work.weights + g * work.group_stride;
  for (int64_t b = work.begin; b < work.end; ++b) {
    if (Layout::kPacked && work.row == 0) {  // later rows find the weights in the cache
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
#pragma GCC unroll 16
        for (int64_t line = 0; line < Layout::kBytes; line += 64) {
          __builtin_prefetch(w[g] + ahead + line);
        }
      }
    }
    Dots<kWide> dots[P][R][G], upper[P][R][G];
    BeginBlock<Layout, P, R, G>(blocks, stride, 0, dots);
    if constexpr (Layout::kHalves) BeginBlock<Layout, P, R, G>(blocks, stride, 1, upper);
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      Codes<kWide> low[G], high[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) Layout::Pair(w[g], i, low[g], high[g]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
          const int8_t* codes = x + r * row_codes + p * kBlockValues + 4 * i;
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
    }
    AddHalf<Layout, P, R, G>(w, 0, blocks, stride, dots, sums);
    if constexpr (Layout::kHalves) AddHalf<Layout, P, R, G>(w, 1, blocks, stride, upper, sums);
    if constexpr (Layout::kOffset) {
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        const Vec offset = Layout::Offset(w[g]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          sums[r][g] = Fma(offset, Broadcast(blocks[r * stride].scaled_sum), sums[r][g]);
        }
      }
    }
    x += P * kBlockValues;
    ++blocks;
    for (int g = 0; g < G; ++g) w[g] += Layout::kBytes;
  }
  EndSums<R, G>(work.last, share, work.row, work.group, scratch, sums);
}

// As many rows as the registers hold.
template <typename Layout, int P>
constexpr int RowsAtOnce() {
  if (kWideRegisters) return P == 2 && Layout::kHalves ? 2 : 4;
  return (Layout::kWide ? 2 : 4) / P;
}

// All rows over blocks [work.begin, work.end) of G groups.
template <typename Layout, int P, int G>
void RunRows(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
             Work work) {
  constexpr int kRows = RowsAtOnce<Layout, P>();
  const auto sums = [&] { return scratch.sums + work.row * G * kLanes; };
  work.row = 0;
  for (; work.row + kRows <= input.rows; work.row += kRows) {
    RunBlocks<Layout, P, kRows, G>(input, share, work, sums());
  }
  if constexpr (kRows > 2) {
    for (; work.row + 2 <= input.rows; work.row += 2) {
      RunBlocks<Layout, P, 2, G>(input, share, work, sums());
    }
  }
  for (; work.row < input.rows; ++work.row) RunBlocks<Layout, P, 1, G>(input, share, work, sums());
}

template <typename Layout, int P>
void RunDirect(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  const PackedView& weight = share.weight;
  Work work{nullptr, weight.group_bytes, 0, input.k / kBlockValues, 0, 0, true, true};
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

// Unpack a block of a group to a tile.

template <bool kMinimum>
struct NibbleUnpacker {
  using Layout = TileLayout<kMinimum ? 0 : 8, kMinimum, false>;
  using Packed = NibbleLayout<kMinimum>;
  static void Unpack(const PackedView& weight, const uint8_t* group, int64_t block, uint8_t* tile) {
    const uint8_t* from = group + block * Packed::kBytes;
    for (int i = 0; i < 4; ++i) {
      Codes<false> low, high;
      Packed::Pair(from, i, low, high);
      StoreCodes(tile + 64 * i, low);
      StoreCodes(tile + 64 * (i + 4), high);
    }
    Store(reinterpret_cast<float*>(tile + 512), Packed::Scale(from, 0));
    if (kMinimum) Store(reinterpret_cast<float*>(tile + 576), Packed::Offset(from));
  }
};

template <bool kTwoScales>
struct StoredUnpacker {
  using Layout = TileLayout<128, !kTwoScales, kTwoScales>;
  static void Unpack(const PackedView& weight, const uint8_t* group, int64_t block, uint8_t* tile) {
    const int64_t row_bytes = weight.group_bytes / kGroupFeatures;
    constexpr int kWidth = kTwoScales ? 16 : 32;
    float* constants = reinterpret_cast<float*>(tile + 512);
    CodeGroup codes;
    for (int64_t lane = 0; lane < kGroupFeatures; ++lane) {
      const auto* row = reinterpret_cast<const std::byte*>(group + lane * row_bytes);
      for (int part = 0; part < 32 / kWidth; ++part) {
        weight.format->codes(row, block * (32 / kWidth) + part, codes);
        for (int i = 0; i < kWidth; ++i) {
          const int k = part * kWidth + i;
          tile[k / 4 * 64 + lane * 4 + k % 4] = static_cast<uint8_t>(codes.codes[i] + 128);
        }
        constants[part * kLanes + lane] = codes.scale;
      }
      if (!kTwoScales) constants[kLanes + lane] = codes.offset;
    }
  }
};

template <typename Unpacker, int P, int G>
void RunTiles(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
              int64_t group) {
  using Layout = typename Unpacker::Layout;
  static_assert(G * kTileBlocks * Layout::kBytes <= kTileBytes);
  const int64_t blocks = input.k / kBlockValues;
  for (int64_t begin = 0; begin < blocks; begin += kTileBlocks) {
    const int64_t end = begin + kTileBlocks < blocks ? begin + kTileBlocks : blocks;
    for (int g = 0; g < G; ++g) {
      const uint8_t* packed = share.weight.data + (group + g) * share.weight.group_bytes;
      uint8_t* tile = scratch.tile + g * kTileBlocks * Layout::kBytes;
      for (int64_t b = begin; b < end; ++b, tile += Layout::kBytes) {
        Unpacker::Unpack(share.weight, packed, b, tile);
      }
    }
    const Work work{scratch.tile, kTileBlocks * Layout::kBytes, begin, end, 0, group, begin == 0,
                    end == blocks};
    RunRows<Layout, P, G>(input, share, scratch, work);
  }
}

template <typename Unpacker, int P>
void RunTiled(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  int64_t group = share.group_begin;
  if (kWideRegisters) {
    for (; group + 2 <= share.group_end; group += 2) {
      RunTiles<Unpacker, P, 2>(input, share, scratch, group);
    }
  }
  for (; group < share.group_end; ++group) RunTiles<Unpacker, P, 1>(input, share, scratch, group);
}

template <bool kMinimum, int P>
void RunNibbles(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  if (input.rows <= kDirectRows) {
    RunDirect<NibbleLayout<kMinimum>, P>(input, share, scratch);
  } else {
    RunTiled<NibbleUnpacker<kMinimum>, P>(input, share, scratch);
  }
}

template <int P>
void RunPlanes(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  switch (share.weight.kind) {
    case PackKind::kF32:
    case PackKind::kF16:
    case PackKind::kBF16:
      MatMulExact(input, share, scratch);
      return;
    case PackKind::kQ4_0:
      RunNibbles<false, P>(input, share, scratch);
      return;
    case PackKind::kQ4_1:
      RunNibbles<true, P>(input, share, scratch);
      return;
    case PackKind::kQ8_0:
      RunDirect<ByteLayout, P>(input, share, scratch);
      return;
    case PackKind::kStored:
      if (share.weight.format->group == 16) {
        RunTiled<StoredUnpacker<true>, P>(input, share, scratch);
      } else {
        RunTiled<StoredUnpacker<false>, P>(input, share, scratch);
      }
      return;
  }
}

}  // namespace

void MatMulInt8(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  RunPlanes<1>(input, share, scratch);
}
void MatMulInt16(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  RunPlanes<2>(input, share, scratch);
}

}  // namespace treadle::TREADLE_ISA
