// The products of matmul_blocks.h for many rows on a processor with AMX: 16 rows by 16 features at
// a time, on tile registers. Sums of integers are exact, and what follows them is the same, so the
// bits are, too. Only of blocks with one scale: two of them take twice the tile instructions, as
// many as vectors do without.
//
// Compiled for AVX-512 only.
#include "kernels/cpu/matmul/activation_codes.h"
#include "kernels/cpu/matmul/block_layouts.h"
#include "kernels/cpu/matmul/matmul_lanes.h"
#include "kernels/cpu/matmul/tile_registers.h"

namespace treadle::TREADLE_ISA {
namespace {

// Groups for each tile of rows: fewer where there are few tiles, so that all stays in the L1 cache.
constexpr int64_t kGroupsAtOnce = 4, kFewGroups = 2;
constexpr int64_t kFewTiles = 4;
constexpr int64_t kCachedBytes = 1 << 20;  // of activations that stay in the cache for all groups

// A form of 32 activations of 16 rows: planes of so many bytes a row, a product each. kSpans: the
// blocks of a span share a scale.
template <int kPlaneCount, int64_t kRowCodes, int32_t kStepCount, bool kShared>
struct RowsForm {
  static constexpr int kPlanes = kPlaneCount;
  static constexpr int64_t kCodes = kRowCodes;
  static constexpr int32_t kSteps = kStepCount;
  static constexpr bool kSpans = kShared;
  static constexpr bool kNibbles = kCodes == 2 * kBlockValues;
  static constexpr int64_t kPlaneBytes = kTileRows * kCodes;
  static constexpr int64_t kBytes = kPlanes * kPlaneBytes + kTileRows * 8;
};
using Bytes = RowsForm<1, kBlockValues, kInt8Steps, false>;
using Planes = RowsForm<2, kBlockValues, kInt16Steps, true>;
// Rows of kInt12: high, then low, which are multiplied with 16 * code, then code.
using Nibbles = RowsForm<1, 2 * kBlockValues, kInt12Steps, true>;
static_assert(Bytes::kBytes == kTileBlockInt8 && Planes::kBytes == kTileBlockInt16 &&
              Nibbles::kBytes == kTileBlockInt12);

// Registers 0 to 3 hold sums: of every other block two planes. Then come these.
constexpr int kActivationTile = 4, kCodeTile = 6;

// An unpacked block: codes in dwords of four k (of nibbles 16 times each, then each), f32
// scale[16], and offset[16] if there are any. Codes are signed, but for nibbles without a zero.
template <typename Packed, typename Form>
struct CodeTile {
  static constexpr int64_t kCodesAt = Form::kNibbles ? 512 : 0;
  static constexpr int64_t kScales = kCodesAt + 512;
  static constexpr int64_t kBytes = kScales + 64 * (1 + Packed::kOffsets);
  static_assert(kGroupsAtOnce * kMaxSpanBlocks * kBytes <= kTileBytes);

  TREADLE_SIMD static void Unpack(const uint8_t* group, int64_t block, uint8_t* tile) {
    UnpackBlockWith<Packed, kTileLine>(group, block, tile + kCodesAt, [](uint8_t* p, auto codes) {
      const __m512i signed_codes =
          _mm512_sub_epi8(codes.v, _mm512_set1_epi8(static_cast<char>(Packed::kZero)));
      _mm512_storeu_si512(p, signed_codes);
      if constexpr (Form::kNibbles) {
        const __m512i high = _mm512_set1_epi8(static_cast<char>(0xf0));
        _mm512_storeu_si512(p - kCodesAt,
                            _mm512_and_si512(_mm512_slli_epi16(signed_codes, 4), high));
      }
    });
  }
};

// Stored sums: of every other block, of each plane.
struct alignas(64) TileDots {
  int32_t of[2][2][kTileRows][16];
};
using Sums = __m512[kTileRows];

// A block of codes and of 16 rows.
struct BlockPair {
  const uint8_t* codes;
  const uint8_t* rows;
};

template <typename Form>
TREADLE_SIMD const float* RowScales(const uint8_t* rows) {
  return Floats(rows + Form::kPlanes * Form::kPlaneBytes);
}

// kOdd: whether of an odd block.
template <typename Packed, typename Form, int kOdd, int kPlane>
TREADLE_SIMD void Multiply() {
  constexpr int kSums = 2 * kOdd + kPlane, kActivations = kActivationTile + kPlane;
  ZeroTile<kSums>();
  if constexpr (Form::kNibbles && Packed::kZero == 0) {
    AddUnsigned<kSums, kActivations, kCodeTile>();
  } else {
    AddSigned<kSums, kActivations, kCodeTile>();
  }
}

template <typename Packed, int kFrom, int kTo>
TREADLE_SIMD void AddOffsets(const uint8_t* offsets, const float* row_sums, Sums& sums) {
  if constexpr (Packed::kOffsets > 0) {
    const Vec offset = Load(Floats(offsets));
    ForEach<kFrom, kTo>([&]<int r>() __attribute__((always_inline)) {
      sums[r] = Fma(offset, Broadcast(row_sums[r]), {sums[r]}).v;
    });
  }
}

// Adds rows [kFrom, kTo) of a block. A plane's dot is an integer below 2^24: joined as floats, with
// one rounding, two of them give what their integer would.
template <typename Packed, typename Form, int kOdd, int kFrom, int kTo>
TREADLE_SIMD void AddRows(const BlockPair& at, const TileDots& dots, Sums& sums) {
  using Codes = CodeTile<Packed, Form>;
  const Vec scale = Load(Floats(at.codes + Codes::kScales));
  const float* row_scales = RowScales<Form>(at.rows);
  ForEach<kFrom, kTo>([&]<int r>() __attribute__((always_inline)) {
    const auto plane = [&](int p) __attribute__((always_inline)) {
      return Vec{_mm512_cvtepi32_ps(_mm512_load_si512(dots.of[kOdd][p][r]))};
    };
    const Vec dot = Form::kPlanes == 1 ? plane(0) : Fma(plane(1), Broadcast(128.0f), plane(0));
    const Vec factor = Form::kSpans ? scale : Mul(scale, Broadcast(row_scales[r]));
    sums[r] = Fma(dot, factor, {sums[r]}).v;
  });
  if constexpr (!Form::kSpans) {
    AddOffsets<Packed, kFrom, kTo>(at.codes + Codes::kScales + 64, row_scales + kTileRows, sums);
  }
}

// A step of three blocks: adds one, stores the sums of the next, and multiplies the one after that,
// a few instructions of each at a time: tiles and vectors take turns otherwise. Without kAdd the
// first is none.
template <typename Packed, typename Form, int kOdd, bool kAdd>
TREADLE_SIMD void RunStep(const BlockPair& added, const BlockPair& multiplied, TileDots& dots,
                          Sums& sums) {
  const auto add = [&]<int kFrom, int kTo>() __attribute__((always_inline)) {
    if constexpr (kAdd) AddRows<Packed, Form, kOdd, kFrom, kTo>(added, dots, sums);
  };
  LoadTile<kCodeTile>(multiplied.codes, kTileLine);
  add.template operator()<0, 2>();
  LoadTile<kActivationTile>(multiplied.rows, Form::kCodes);
  add.template operator()<2, 4>();
  Multiply<Packed, Form, kOdd, 0>();
  add.template operator()<4, 7>();
  if constexpr (Form::kPlanes == 2) {
    LoadTile<kActivationTile + 1>(multiplied.rows + Form::kPlaneBytes, Form::kCodes);
  }
  add.template operator()<7, 8>();
  if constexpr (Form::kPlanes == 2) Multiply<Packed, Form, kOdd, 1>();
  add.template operator()<8, 10>();
  StoreTile<2 - 2 * kOdd>(dots.of[1 - kOdd][0]);
  add.template operator()<10, 13>();
  if constexpr (Form::kPlanes == 2) StoreTile<3 - 2 * kOdd>(dots.of[1 - kOdd][1]);
  add.template operator()<13, 16>();
}

// The blocks of a span, of 16 rows by the features of a group.
struct Item {
  BlockPair first;
  int64_t blocks;

  // Where its block `b` is, or its last one.
  template <typename Packed, typename Form>
  TREADLE_SIMD BlockPair At(int64_t b) const {
    if (b >= blocks) b = blocks - 1;
    return {first.codes + b * CodeTile<Packed, Form>::kBytes, first.rows + b * Form::kBytes};
  }
};

// Adds an item to the sums, while the first two blocks of the next begin.
template <typename Packed, typename Form>
TREADLE_SIMD void RunItem(const Item& item, const Item& next, TileDots& dots, Sums& sums) {
  for (int64_t b = 0; b < item.blocks; b += 2) {
    const bool more = b + 2 < item.blocks;
    const Item& from = more ? item : next;
    const int64_t at = more ? b + 2 : 0;
    RunStep<Packed, Form, 0, true>(item.At<Packed, Form>(b), from.At<Packed, Form>(at), dots, sums);
    if (b + 1 < item.blocks) {
      RunStep<Packed, Form, 1, true>(item.At<Packed, Form>(b + 1), from.At<Packed, Form>(at + 1),
                                     dots, sums);
    } else {
      RunStep<Packed, Form, 1, false>({}, from.At<Packed, Form>(at + 1), dots, sums);
    }
  }
}

// Adds an item to what came before it: minima, then its sums times the rows' scales.
template <typename Packed, typename Form>
TREADLE_SIMD void AddSpan(const Item& item, const Sums& sums, Vec (&ends)[kTileRows][1]) {
  const auto half = [&]<int kFrom, int kTo>() __attribute__((always_inline)) {
    Sums before;
    ForEach<kFrom, kTo>([&]<int r>() __attribute__((always_inline)) { before[r] = ends[r][0].v; });
    for (int64_t b = 0; Packed::kOffsets > 0 && b < item.blocks; ++b) {
      const BlockPair at = item.At<Packed, Form>(b);
      AddOffsets<Packed, kFrom, kTo>(at.codes + CodeTile<Packed, Form>::kScales + 64,
                                     RowScales<Form>(at.rows) + kTileRows, before);
    }
    const float* row_scales = RowScales<Form>(item.first.rows);
    ForEach<kFrom, kTo>([&]<int r>() __attribute__((always_inline)) {
      ends[r][0] = Fma({sums[r]}, Broadcast(row_scales[r]), {before[r]});
    });
  };
  half.template operator()<0, 8>();
  half.template operator()<8, 16>();
}

// Row tiles [tile, tile_end) by `groups` groups, whose blocks [range.begin, range.end) are
// unpacked.
template <typename Packed, typename Form>
TREADLE_LOOP void RunSpan(const MatMulInput& input, const MatMulShare& share,
                          const MatMulScratch& scratch, const BlockRange& range, int64_t groups,
                          int64_t tile, int64_t tile_end) {
  const int64_t next_bytes = share.weight.group_bytes / (input.k / kBlockValues);  // of a block
  const uint8_t* packed_next =
      share.weight.data +
      (range.last ? range.group + groups : range.group) * share.weight.group_bytes +
      (range.last ? 0 : range.end * next_bytes);
  const int64_t blocks = range.end - range.begin, group = range.group;
  const auto item_at = [&](int64_t t, int64_t g) __attribute__((always_inline)) {
    if (g == groups) ++t, g = 0;
    if (t == tile_end) t = tile;  // which is not added again
    return Item{{scratch.tile + g * blocks * CodeTile<Packed, Form>::kBytes,
                 input.tiles + (t * (input.k / kBlockValues) + range.begin) * Form::kBytes},
                blocks};
  };
  const int64_t next_lines = blocks * next_bytes / 64 / (tile_end - tile) + 1;
  TileDots dots;
  Item item = item_at(tile, 0);
  Sums none;
  RunStep<Packed, Form, 0, false>({}, item.At<Packed, Form>(0), dots, none);
  RunStep<Packed, Form, 1, false>({}, item.At<Packed, Form>(1), dots, none);
  for (int64_t t = tile; t < tile_end; ++t) {
    const int64_t row = t * kTileRows - input.first_lane, rows_left = input.rows - row;
    for (int64_t g = 0; g < groups; ++g) {
      // While these blocks are multiplied, the next ones come.
      const uint8_t* line =
          packed_next + g * share.weight.group_bytes + (t - tile) * next_lines * 64;
      for (int64_t i = 0; i < next_lines; ++i) __builtin_prefetch(line + 64 * i, 0, 2);
      if (range.last) {  // and so do the next tile's results
        float* out =
            share.out + (row + kTileRows) * share.out_stride + (group + g) * kGroupFeatures;
        for (int64_t r = kTileRows; r < rows_left && r < 2 * kTileRows;
             ++r, out += share.out_stride) {
          __builtin_prefetch(out, 1, 3);
        }
      }
      const Item next = item_at(t, g + 1);
      float* kept = scratch.sums + ((t - tile) * kGroupsAtOnce + g) * kTileRows * kLanes;
      Vec ends[kTileRows][1];
      Sums sums;
      if constexpr (!Form::kSpans) BeginSums<kTileRows, 1>(range.first, kept, ends);
      ForEach<0, kTileRows>([&]<int r>() __attribute__((always_inline)) {
        sums[r] = Form::kSpans ? _mm512_setzero_ps() : ends[r][0].v;
      });
      RunItem<Packed, Form>(item, next, dots, sums);
      if constexpr (Form::kSpans) {
        BeginSums<kTileRows, 1>(range.first, kept, ends);
        AddSpan<Packed, Form>(item, sums, ends);
      } else {
        ForEach<0, kTileRows>([&]<int r>()
                                  __attribute__((always_inline)) { ends[r][0].v = sums[r]; });
      }
      EndSums<kTileRows, 1>(range.last, share, row, group + g, kept, ends, row < 0 ? -row : 0,
                            rows_left < kTileRows ? rows_left : kTileRows);
      item = next;
    }
  }
}

// Row tiles [tile, tile_end) by all groups.
template <typename Packed, typename Form>
void RunRowTiles(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
                 int64_t tile, int64_t tile_end) {
  using Codes = CodeTile<Packed, Form>;
  const int64_t blocks = input.k / kBlockValues;
  const int64_t most = tile_end - tile > kFewTiles ? kGroupsAtOnce : kFewGroups;
  for (int64_t group = share.group_begin; group < share.group_end; group += most) {
    const int64_t left = share.group_end - group;
    const int64_t groups = left < most ? left : most;
    for (int64_t begin = 0, end; begin < blocks; begin = end) {
      end = SpanEnd(begin, blocks);
      uint8_t* unpacked = scratch.tile;
      for (int64_t g = 0; g < groups; ++g) {
        const uint8_t* packed = share.weight.data + (group + g) * share.weight.group_bytes;
        for (int64_t b = begin; b < end; ++b, unpacked += Codes::kBytes) {
          Codes::Unpack(packed, b, unpacked);
        }
      }
      RunSpan<Packed, Form>(input, share, scratch,
                            {begin, end, 0, group, begin == 0, end == blocks}, groups, tile,
                            tile_end);
    }
  }
}

template <typename Packed, typename Form>
void RunBlocks(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  TileShapes shapes;
  for (int sums = 0; sums < 4; ++sums) shapes.Set(sums, kTileRows, kTileLine);
  for (int p = 0; p < 2; ++p) shapes.Set(kActivationTile + p, kTileRows, Form::kCodes);
  shapes.Set(kCodeTile, Form::kCodes / 4, kTileLine);
  const ScopedTiles registers(shapes);
  const int64_t tiles = (input.first_lane + input.rows + kTileRows - 1) / kTileRows;
  const int64_t fitting = kCachedBytes / (input.k / kBlockValues * Form::kBytes);
  const int64_t at_once = fitting > 0 ? fitting : 1;
  for (int64_t t = 0; t < tiles; t += at_once) {
    RunRowTiles<Packed, Form>(input, share, scratch, t, t + at_once < tiles ? t + at_once : tiles);
  }
}

template <typename Form>
void Run(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  WithBlockLayout(share.weight.kind, [&]<typename Layout>() {
    if constexpr (!Layout::kHalves && !(Form::kNibbles && Layout::kWide)) {
      RunBlocks<Layout, Form>(input, share, scratch);
    }
  });
}

// Lane r: what `op` makes of the lanes of rows[r].
template <typename Op>
TREADLE_SIMD __m512i ReduceEach(const __m512i (&rows)[kTileRows], Op op) {
  __m512i fours[4];  // rows 4i to 4i + 3, in each 128 bits a part of their lanes
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i* r = rows + 4 * i;
    const __m512i a = op(_mm512_unpacklo_epi32(r[0], r[1]), _mm512_unpackhi_epi32(r[0], r[1]));
    const __m512i b = op(_mm512_unpacklo_epi32(r[2], r[3]), _mm512_unpackhi_epi32(r[2], r[3]));
    fours[i] = op(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  const auto join = [&](__m512i a, __m512i b) __attribute__((always_inline)) {
    return op(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  };
  return join(join(fours[0], fours[1]), join(fours[2], fours[3]));
}

TREADLE_SIMD void StoreLowBytes(int8_t* to, const __m512i (&q)[2]) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(q[0]));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm512_cvtepi32_epi8(q[1]));
}

// Stores as StorePlanes and StoreByteCodes do.
template <typename Form>
TREADLE_SIMD void StoreRow(int8_t* codes, const __m512i (&q)[2]) {
  if constexpr (Form::kPlanes == 1 && !Form::kNibbles) return StoreLowBytes(codes, q);
  constexpr int kBits = Form::kNibbles ? 4 : 7;
  constexpr int64_t kLow = Form::kNibbles ? kBlockValues : 0;
  constexpr int64_t kHigh = Form::kNibbles ? 0 : Form::kPlaneBytes;
  __m512i low[2], high[2];
  for (int i = 0; i < 2; ++i) {
    high[i] = _mm512_srai_epi32(_mm512_add_epi32(q[i], _mm512_set1_epi32(1 << (kBits - 1))), kBits);
    low[i] = _mm512_sub_epi32(q[i], _mm512_slli_epi32(high[i], kBits));
  }
  StoreLowBytes(codes + kLow, low);
  StoreLowBytes(codes + kHigh, high);
}

// As QuantizeInt8 and its like do it; constants of sixteen rows are computed at a time.
template <typename Form>
TREADLE_LOOP void QuantizeRows(const float* x, int64_t stride, int64_t lane, int64_t rows,
                               int64_t k, uint8_t* tile) {
  const __m512 steps = _mm512_set1_ps(Form::kSteps);
  const __m512i most = _mm512_set1_epi32(Form::kSteps), least = _mm512_set1_epi32(-Form::kSteps);
  const auto wanted = static_cast<__mmask16>((1u << rows) - 1);
  const int64_t blocks = k / kBlockValues;
  for (int64_t first = 0, last; first < blocks; first = last) {
    last = Form::kSpans ? SpanEnd(first, blocks) : first + 1;
    const int64_t begin = first * kBlockValues, end = last * kBlockValues;
    __m512i of_rows[kTileRows] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
      for (int64_t i = begin; i < end; i += kLanes) {
        of_rows[r] = _mm512_max_epi32(
            of_rows[r], _mm512_and_si512(_mm512_loadu_si512(x + r * stride + i), magnitude));
      }
    }
    const __m512 absmax = _mm512_castsi512_ps(ReduceEach(
        of_rows, [](__m512i a, __m512i c)
                     __attribute__((always_inline)) { return _mm512_max_epi32(a, c); }));
    const __mmask16 scaled =
        _mm512_cmp_ps_mask(absmax, _mm512_set1_ps(0x1p-100f), _CMP_NLT_UQ);  // NaN, too
    const __m512 scale = _mm512_maskz_div_ps(scaled, absmax, steps);
    alignas(64) float inverses[kTileRows];
    _mm512_store_ps(inverses, _mm512_maskz_div_ps(scaled, steps, absmax));
    for (int64_t b = begin; b < end; b += kBlockValues, tile += Form::kBytes) {
      for (int64_t r = 0; r < rows; ++r) {
        const float* row = x + r * stride + b;
        __m512i q[2];
        for (int i = 0; i < 2; ++i) {
          q[i] = _mm512_cvtps_epi32(
              _mm512_mul_ps(_mm512_loadu_ps(row + 16 * i), _mm512_set1_ps(inverses[r])));
          q[i] = _mm512_max_epi32(_mm512_min_epi32(q[i], most), least);
        }
        StoreRow<Form>(reinterpret_cast<int8_t*>(tile) + (lane + r) * Form::kCodes, q);
        of_rows[r] = _mm512_add_epi32(q[0], q[1]);
      }
      const __m512i sums = ReduceEach(
          of_rows, [](__m512i a, __m512i c)
                       __attribute__((always_inline)) { return _mm512_add_epi32(a, c); });
      float* scales = reinterpret_cast<float*>(tile + Form::kPlanes * Form::kPlaneBytes) + lane;
      _mm512_mask_storeu_ps(scales, wanted, scale);
      _mm512_mask_storeu_ps(scales + kTileRows, wanted,
                            _mm512_mul_ps(scale, _mm512_cvtepi32_ps(sums)));
    }
  }
}

}  // namespace

void MatMulTilesInt8(const MatMulInput& input, const MatMulShare& share,
                     const MatMulScratch& scratch) {
  Run<Bytes>(input, share, scratch);
}
void MatMulTilesInt12(const MatMulInput& input, const MatMulShare& share,
                      const MatMulScratch& scratch) {
  Run<Nibbles>(input, share, scratch);
}
void MatMulTilesInt16(const MatMulInput& input, const MatMulShare& share,
                      const MatMulScratch& scratch) {
  Run<Planes>(input, share, scratch);
}
void QuantizeTileInt8(const float* x, int64_t stride, int64_t lane, int64_t rows, int64_t k,
                      uint8_t* tile) {
  QuantizeRows<Bytes>(x, stride, lane, rows, k, tile);
}
void QuantizeTileInt12(const float* x, int64_t stride, int64_t lane, int64_t rows, int64_t k,
                       uint8_t* tile) {
  QuantizeRows<Nibbles>(x, stride, lane, rows, k, tile);
}
void QuantizeTileInt16(const float* x, int64_t stride, int64_t lane, int64_t rows, int64_t k,
                       uint8_t* tile) {
  QuantizeRows<Planes>(x, stride, lane, rows, k, tile);
}

}  // namespace treadle::TREADLE_ISA
