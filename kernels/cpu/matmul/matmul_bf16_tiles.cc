// The products of matmul_bf16.cc on AMX: 32 k of 16 features by 16 rows at a time, summed in tile
// registers over all of k. Weights of a few groups are decoded to bf16 at a time, each feature's by
// a table of what its codes stand for in a block.
//
// Compiled for AVX-512 only; instructions of BF16 and VBMI are named.
#include "kernels/cpu/matmul/matmul_lanes.h"
#include "kernels/cpu/matmul/tile_registers.h"

namespace treadle::TREADLE_ISA {
namespace {

// Blocks that are decoded at a time, of two groups: in the first-level cache they leave room for
// the rows that pass by and for sums.
constexpr int64_t kTileBlocks = 10;
constexpr int64_t kBlockBytes = kTileBlockBf16;
static_assert(2 * kTileBlocks * kBlockBytes <= kTileBytes);

// Registers: sums, of which a kernel uses up to four; then weights, and activations.
constexpr int kWeightTile = 4, kRowTile = 6;

TREADLE_SIMD __m512i SelectBits(__m512i starts, __m512i bits) {
  __m512i out;
  asm("vpmultishiftqb %1, %2, %0" : "=v"(out) : "v"(bits), "v"(starts));
  return out;
}

// Lane i of row j becomes lane j of row i.
TREADLE_SIMD void Transpose(__m512i (&rows)[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    const __m512i b = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(rows[i + 2], rows[i + 3]);
    const __m512i d = _mm512_unpackhi_epi32(rows[i + 2], rows[i + 3]);
    t[i] = _mm512_unpacklo_epi64(a, c);
    t[i + 1] = _mm512_unpackhi_epi64(a, c);
    t[i + 2] = _mm512_unpacklo_epi64(b, d);
    t[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
    rows[i] = _mm512_shuffle_i32x4(a, b, 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88);
    rows[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
}

// The meaning of a block's second constant.
enum class Second : uint8_t { kNone, kOffset, kZero };

// Decoders of a block to 16 rows of 32 bf16.
template <Second kSecond>
struct Table {
  const Vec values;  // of the codes
  const __m512i starts;

  TREADLE_SIMD explicit Table(const PackedView& weight)
      : values(Load(weight.codebook)),
        starts(_mm512_set_epi64(0x003c003800340030, 0x003c003800340030, 0x002c002800240020,
                                0x002c002800240020, 0x001c001800140010, 0x001c001800140010,
                                0x000c000800040000, 0x000c000800040000)) {}
  TREADLE_SIMD void Decode(const uint8_t* block, uint8_t* rows) const {
    const float* scales = reinterpret_cast<const float*>(block + 256);
#pragma GCC unroll 16
    for (int f = 0; f < 16; ++f) {
      const Vec scale = Broadcast(scales[f]);
      Vec stands;
      if constexpr (kSecond == Second::kNone) {
        stands = Mul(values, scale);
      } else if constexpr (kSecond == Second::kOffset) {
        stands = Fma(values, scale, Broadcast(scales[16 + f]));
      } else {
        stands = Mul(Sub(values, Broadcast(scales[16 + f])), scale);
      }
      // A word's low five bits choose: its code, and the next one's first bit.
      const __m512i table = RoundPair(stands.v, stands.v);
      const __m512i codes =
          _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 16 * f)));
      _mm512_storeu_si512(rows + kTileLine * f,
                          _mm512_permutexvar_epi16(SelectBits(starts, codes), table));
    }
  }
};

template <bool kHalves, bool kOffset>
struct Bytes {
  TREADLE_SIMD explicit Bytes(const PackedView&) {}
  TREADLE_SIMD void Decode(const uint8_t* block, uint8_t* rows) const {
    const float* scales = reinterpret_cast<const float*>(block + 512);
    for (int f = 0; f < 16; ++f) {
      Vec w[2];
      for (int half = 0; half < 2; ++half) {
        const Vec value = LoadSigned(block + 32 * f + 16 * half);
        const Vec scale = Broadcast(scales[kHalves ? 16 * half + f : f]);
        w[half] = kOffset ? Fma(value, scale, Broadcast(scales[(kHalves ? 32 : 16) + f]))
                          : Mul(value, scale);
      }
      _mm512_storeu_si512(rows + kTileLine * f, RoundPair(w[0].v, w[1].v));
    }
  }
};

// bf16 weights are read where they lie.
struct Plain {
  TREADLE_SIMD explicit Plain(const PackedView&) {}
};
template <typename Decoder>
constexpr bool kIsPlain = false;
template <>
constexpr bool kIsPlain<Plain> = true;

template <typename Body>
inline void WithDecoder(const PackedView& weight, Body body) {
  if (weight.kind == PackKind::kTilesBf16) return body.template operator()<Plain>();
  if (weight.kind == PackKind::kTiles4) {
    if (!weight.seconds) return body.template operator()<Table<Second::kNone>>();
    if (weight.zeros) return body.template operator()<Table<Second::kZero>>();
    return body.template operator()<Table<Second::kOffset>>();
  }
  if (weight.halves && weight.seconds) return body.template operator()<Bytes<true, true>>();
  if (weight.halves) return body.template operator()<Bytes<true, false>>();
  if (weight.seconds) return body.template operator()<Bytes<false, true>>();
  return body.template operator()<Bytes<false, false>>();
}

// Results of rows of a tile from their sums [16 features][16 rows].
TREADLE_SIMD void WriteRows(const MatMulInput& input, const MatMulShare& share, int64_t tile,
                            int64_t group, const float* sums) {
  __m512i values[16];
#pragma GCC unroll 16
  for (int f = 0; f < 16; ++f) values[f] = _mm512_loadu_si512(sums + f * kLanes);
  Transpose(values);
  const int64_t row = tile * kTileRows - input.first_lane;
  const int64_t first = row < 0 ? -row : 0, left = input.rows - row;
  const int64_t feature = group * kGroupFeatures;
  const int64_t lanes = share.weight.n - feature < kLanes ? share.weight.n - feature : kLanes;
  const bool has_bias = share.bias != nullptr;
  const Vec bias = has_bias ? LoadLanes(share.bias + feature, lanes) : Zero();
  float* const out = share.out + row * share.out_stride + feature;
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
    if (r < first || r >= left) continue;
    float* const to = out + r * share.out_stride;
    Vec value = {_mm512_castsi512_ps(values[r])};
    if (has_bias) value = Add(value, bias);
    if (share.accumulate) value = Add(value, LoadLanes(to, lanes));
    StoreLanes(to, value, lanes);
  }
}

int64_t Blocks(int64_t k) { return (k + kBlockValues - 1) / kBlockValues; }

// One tile of rows by G groups, each block decoded right before its product.
template <typename Decoder, int G>
TREADLE_LOOP void RunOneTile(const MatMulInput& input, const MatMulShare& share,
                             const MatMulScratch& scratch, int64_t group) {
  const Decoder decoder(share.weight);
  const int64_t blocks = Blocks(input.k);
  const int64_t block_bytes = TileBlockBytes(share.weight);
  const int64_t group_bytes = share.weight.group_bytes;
  const uint8_t* weights = share.weight.data + group * group_bytes;
  const uint8_t* rows = input.tiles;
  ForEach<0, G>([&]<int g>() __attribute__((always_inline)) { ZeroTile<g>(); });
  for (int64_t b = 0; b < blocks; ++b, weights += block_bytes, rows += kBlockBytes) {
    const uint8_t* values = weights;
    int64_t values_group = group_bytes;
    if constexpr (!kIsPlain<Decoder>) {
      for (int g = 0; g < G; ++g) {
        const uint8_t* block = weights + g * group_bytes;
        for (int64_t i = 0; i < block_bytes; i += 64) {
          FetchLater(block + G * group_bytes + i);
        }
        decoder.Decode(block, scratch.tile + g * kBlockBytes);
      }
      values = scratch.tile;
      values_group = kBlockBytes;
    }
    LoadTile<kRowTile>(rows, kTileLine);
    ForEach<0, G>([&]<int g>() __attribute__((always_inline)) {
      LoadTile<kWeightTile + g % 2>(values + g * values_group, kTileLine);
      AddBf16<g, kWeightTile + g % 2, kRowTile>();
    });
  }
  ForEach<0, G>([&]<int g>() __attribute__((always_inline)) {
    StoreTile<g>(scratch.sums);
    WriteRows(input, share, 0, group + g, scratch.sums);
  });
}

// T row tiles from `tile` on by G groups, over blocks [begin, end), whose weights are `values`.
template <int T, int G>
TREADLE_LOOP void RunTiles(const MatMulInput& input, const MatMulShare& share, int64_t tile,
                           int64_t group, int64_t begin, int64_t end, const uint8_t* values,
                           int64_t values_group, float* sums) {
  const int64_t blocks = Blocks(input.k);
  const uint8_t* rows = input.tiles + (tile * blocks + begin) * kBlockBytes;
  const int64_t next_tile = blocks * kBlockBytes;
  constexpr int64_t kSums = kTileRows * kLanes;
  ForEach<0, T * G>([&]<int i>() __attribute__((always_inline)) {
    if (begin == 0) {
      ZeroTile<i>();
    } else {
      LoadTile<i>(sums + i * kSums, kTileLine);
    }
  });
  for (int64_t b = begin; b < end; ++b, rows += kBlockBytes, values += kBlockBytes) {
    LoadPassingTile<kRowTile>(rows, kTileLine);
    if constexpr (T == 2) LoadPassingTile<kRowTile + 1>(rows + next_tile, kTileLine);
    LoadTile<kWeightTile>(values, kTileLine);
    if constexpr (G == 2) LoadTile<kWeightTile + 1>(values + values_group, kTileLine);
    ForEach<0, T * G>([&]<int i>() __attribute__((always_inline)) {
      AddBf16<i, kWeightTile + i % G, kRowTile + i / G>();
    });
  }
  ForEach<0, T * G>([&]<int i>()
                        __attribute__((always_inline)) { StoreTile<i>(sums + i * kSums); });
  if (end < blocks) return;
  for (int i = 0; i < T * G; ++i) {
    WriteRows(input, share, tile + i / G, group + i % G, sums + i * kSums);
  }
}

template <typename Decoder, int G>
void RunManyTiles(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
                  int64_t group) {
  const Decoder decoder(share.weight);
  const int64_t blocks = Blocks(input.k);
  const int64_t tiles = (input.first_lane + input.rows + kTileRows - 1) / kTileRows;
  const int64_t block_bytes = TileBlockBytes(share.weight);
  const int64_t group_bytes = share.weight.group_bytes;
  constexpr int64_t kSums = G * kTileRows * kLanes;
  for (int64_t begin = 0; begin < blocks; begin += kTileBlocks) {
    const int64_t end = begin + kTileBlocks < blocks ? begin + kTileBlocks : blocks;
    const uint8_t* packed = share.weight.data + group * group_bytes + begin * block_bytes;
    const uint8_t* values = packed;
    int64_t values_group = group_bytes;
    if constexpr (!kIsPlain<Decoder>) {
      uint8_t* to = scratch.tile;
      for (int g = 0; g < G; ++g) {
        for (int64_t b = 0; b < end - begin; ++b, to += kBlockBytes) {
          decoder.Decode(packed + g * group_bytes + b * block_bytes, to);
        }
      }
      values = scratch.tile;
      values_group = (end - begin) * kBlockBytes;
    }
    int64_t t = 0;
    for (; t + 2 <= tiles; t += 2) {
      RunTiles<2, G>(input, share, t, group, begin, end, values, values_group,
                     scratch.sums + t * kSums);
    }
    if (t < tiles) {
      RunTiles<1, G>(input, share, t, group, begin, end, values, values_group,
                     scratch.sums + t * kSums);
    }
  }
}

template <typename Decoder>
void Run(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  int64_t group = share.group_begin;
  if (input.first_lane + input.rows <= kTileRows) {
    for (; group + 4 <= share.group_end; group += 4) {
      RunOneTile<Decoder, 4>(input, share, scratch, group);
    }
    for (; group < share.group_end; ++group) RunOneTile<Decoder, 1>(input, share, scratch, group);
    return;
  }
  for (; group + 2 <= share.group_end; group += 2) {
    RunManyTiles<Decoder, 2>(input, share, scratch, group);
  }
  if (group < share.group_end) RunManyTiles<Decoder, 1>(input, share, scratch, group);
}

}  // namespace

void RoundTileToBf16(const float* x, int64_t stride, int64_t lane, int64_t rows, int64_t /*empty*/,
                     int64_t k, uint8_t* tile) {
  for (int64_t i = 0; i < k; i += kBlockValues, tile += kBlockBytes) {
    const int64_t left = k - i;
    __m512i pairs[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      pairs[r] = _mm512_setzero_si512();
      if (r < lane || r >= lane + rows) continue;
      const float* row = x + (r - lane) * stride + i;
      const Vec low = LoadLanes(row, left < kLanes ? left : kLanes);
      const Vec high = left > kLanes ? LoadLanes(row + kLanes, left - kLanes) : Zero();
      pairs[r] = RoundPair(low.v, high.v);
    }
    Transpose(pairs);
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      _mm512_storeu_si512(tile + kTileLine * pair, pairs[pair]);
    }
  }
}

void MatMulTilesBf16(const MatMulInput& input, const MatMulShare& share,
                     const MatMulScratch& scratch) {
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) shapes.Set(i, kTileRows, kTileLine);
  const ScopedTiles registers(shapes);
  WithDecoder(share.weight, [&]<typename Decoder>() { Run<Decoder>(input, share, scratch); });
}

}  // namespace treadle::TREADLE_ISA
