// Products with float activations: every output is one chain of fma(w, x, sum) over ascending k.
//
// A tile of w is decoded to floats in L1, then all rows run over it; the sums wait in scratch
// between tiles. Chains are latency-bound, so few rows take more groups at once.
#include "kernels/cpu/matmul/block_layouts.h"
#include "kernels/cpu/matmul/float_decoders.h"
#include "kernels/cpu/matmul/matmul_lanes.h"

namespace treadle::TREADLE_ISA {
namespace {

constexpr int64_t kTileFloats = 4096;

// Blocks [begin, end) of a group: w = fma(scale, code, offset).
template <typename Packed>
void DecodeBlocks(const uint8_t* group, int64_t begin, int64_t end, float* tile) {
  using Layout = TileLayout<Packed>;
  alignas(64) uint8_t bytes[Layout::kBytes];
  for (int64_t b = begin; b < end; ++b) {
    UnpackBlock<Packed>(group, b, bytes);
    const Vec zero = Broadcast(static_cast<float>(Packed::kZero));
    for (int dword = 0; dword < 8; ++dword) {
      const int half = dword / 4;
      const Vec scale = Layout::Scale(bytes, 0, Packed::kHalves ? half : 0);
      Vec offset = Zero();
      if constexpr (Packed::kOffsets > 0) {
        offset = Layout::Offset(bytes, 0, Packed::kOffsets > 1 ? half : 0);
      }
#pragma GCC unroll 4
      for (int byte = 0; byte < 4; ++byte, tile += kLanes) {
        Store(tile, Fma(scale, Sub(ByteLane(bytes + 64 * dword, byte), zero), offset));
      }
    }
  }
}

// Where the rows of a tile stand along k.
struct Span {
  int64_t from;
  int64_t count;
  bool first;
  bool last;
};

template <int R, int G>
TREADLE_LOOP void RunRows(const MatMulInput& input, const MatMulShare& share, const Span& span,
                          int64_t row, int64_t group, const float* const (&w)[kMaxGroupsAtOnce],
                          float* scratch) {
  Vec sums[R][G];
  BeginSums<R, G>(span.first, scratch, sums);
  const float* x = input.x + row * input.x_stride + span.from;
  for (int64_t k = 0; k < span.count; ++k) {
    Vec weights[G];
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) weights[g] = Load(w[g] + k * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec activation = Broadcast(x[r * input.x_stride + k]);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) sums[r][g] = Fma(weights[g], activation, sums[r][g]);
    }
  }
  EndSums<R, G>(span.last, share, row, group, scratch, sums);
}

template <int G>
void RunGroups(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
               int64_t group) {
  constexpr int kRows = kWideRegisters ? (G >= 4 ? 4 : 8) : (G >= 2 ? 2 : 6);
  constexpr int64_t kTile = kTileFloats / kLanes / G;
  float* const tile = reinterpret_cast<float*>(scratch.tile);
  for (int64_t from = 0; from < input.k; from += kTile) {
    const int64_t count = input.k - from < kTile ? input.k - from : kTile;
    const Span span{from, count, from == 0, from + count == input.k};
    const float* w[kMaxGroupsAtOnce];
    for (int g = 0; g < G; ++g) {
      w[g] = DecodeTile(share.weight, group + g, from, count, tile + g * kTile * kLanes);
    }
    ForRows<kRows>(input.rows, [&]<int R>(int64_t row) {
      RunRows<R, G>(input, share, span, row, group, w, scratch.sums + row * G * kLanes);
    });
  }
}

// As many rows at a time as leave their activations in the second-level cache, for they are read
// again for every few features. Weights are read, and decoded, once for each of them.
constexpr int64_t kChunkBytes = 512 << 10;
constexpr int64_t kMinChunkRows = 48;

template <typename Body>
void ForRowChunks(const MatMulInput& input, const MatMulShare& share, Body body) {
  const int64_t fitting = kChunkBytes / (4 * input.k) / 8 * 8;
  const int64_t most = fitting > kMinChunkRows ? fitting : kMinChunkRows;
  for (int64_t row = 0; row < input.rows; row += most) {
    MatMulInput rows = input;
    MatMulShare part = share;
    rows.rows = input.rows - row < most ? input.rows - row : most;
    rows.x += row * input.x_stride;
    part.out += row * share.out_stride;
    body(rows, part);
  }
}

}  // namespace

const float* DecodeTile(const PackedView& weight, int64_t group, int64_t from, int64_t count,
                        float* tile) {
  const uint8_t* data = weight.data + group * weight.group_bytes;
  if (weight.kind == PackKind::kF32) return Floats(data) + from * kLanes;
  const int64_t block = from / kBlockValues;
  const bool blocks = WithBlockLayout(weight.kind, [&]<typename Layout>() {
    DecodeBlocks<Layout>(data, block, block + count / kBlockValues, tile);
  });
  if (blocks) return tile;
  WithDecoder(weight,
              [&]<typename Decoder>() { DecodeUnits<Decoder>(weight, data, from, count, tile); });
  return tile;
}

void MatMulExact(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  if (share.weight.kind == PackKind::kRowInt8) return MatMulRowInt8(input, share, scratch);
  if (input.rows <= kDirectRows && MatMulDirect(input, share)) return;
  ForRowChunks(input, share, [&](const MatMulInput& rows, const MatMulShare& part) {
    int64_t group = part.group_begin;
    if (rows.rows <= 2) {
      for (; group + 4 <= part.group_end; group += 4) RunGroups<4>(rows, part, scratch, group);
    }
    if (kWideRegisters) {
      for (; group + 2 <= part.group_end; group += 2) RunGroups<2>(rows, part, scratch, group);
    }
    for (; group < part.group_end; ++group) RunGroups<1>(rows, part, scratch, group);
  });
}

}  // namespace treadle::TREADLE_ISA
