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
constexpr int64_t kGroupsAtOnce = 4, kFewGroups = 1;
constexpr int64_t kFewTiles = 4;
constexpr int64_t kSetsAhead = 4;          // that weights are fetched before they are unpacked
constexpr int kFewRows = 8;                // of a tile of half the height
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
// scale[16], and offset[16] if there are any. Codes are signed, but for those without a zero.
template <typename Packed, typename Form>
struct CodeTile {
  static constexpr int64_t kCodesAt = Form::kNibbles ? 512 : 0;
  static constexpr int64_t kScales = kCodesAt + 512;
  static constexpr int64_t kBytes = kScales + 64 * (1 + Packed::kOffsets);
  static constexpr int64_t kSetBytes = kGroupsAtOnce * kMaxSpanBlocks * kBytes;
  static_assert(2 * kSetBytes <= kTileBytes);

  // A quarter of the codes of a block.
  template <int I>
  TREADLE_SIMD static void UnpackCodes(const uint8_t* group, int64_t block, uint8_t* tile) {
    UnpackPair<Packed, kTileLine, I>(group, block, tile + kCodesAt, [](uint8_t* p, auto codes) {
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

// Blocks [begin, end) of groups from `group` on, which are unpacked at the same time.
struct BlockSet {
  int64_t group, groups, begin, end;

  // The one after it; `most`: of groups.
  BlockSet Next(int64_t most, int64_t group_end, int64_t blocks) const {
    if (end < blocks) return {group, groups, end, SpanEnd(end, blocks)};
    const int64_t left = group_end - group - groups;
    return {group + groups, left < most ? left : most, 0, SpanEnd(0, blocks)};
  }
};

// Blocks [block, end) of a group that are being unpacked, one after the other.
template <typename Packed, typename Form>
struct Unpacking {
  const uint8_t* group;
  int64_t block, end;
  uint8_t* to;
  const uint8_t* ahead;  // what is fetched meanwhile

  TREADLE_SIMD bool More() const { return block < end; }
  template <int I>
  TREADLE_SIMD void Codes() {
    CodeTile<Packed, Form>::template UnpackCodes<I>(group, block, to);
  }
  TREADLE_SIMD void Finish() {
    constexpr int64_t kBytes = Packed::kBytes / Packed::kBlocks;
    UnpackConstants<Packed>(group, block, to + CodeTile<Packed, Form>::kScales);
#pragma GCC unroll 16
    for (int64_t line = 0; line < kBytes; line += 64) FetchLater(ahead + line);
    ahead += kBytes;
    to += CodeTile<Packed, Form>::kBytes;
    ++block;
  }
  TREADLE_SIMD void All() {
    while (More()) {
      ForFour([&]<int I>() __attribute__((always_inline)) { Codes<I>(); });
      Finish();
    }
  }
};

// Stored sums: of every other block, of each plane.
struct alignas(64) TileDots {
  int32_t of[2][2][kTileRows][16];
};
template <int kRows>
using Sums = __m512[kRows];

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
  if constexpr (Packed::kZero == 0) {
    AddUnsigned<kSums, kActivations, kCodeTile>();
  } else {
    AddSigned<kSums, kActivations, kCodeTile>();
  }
}

template <typename Packed, int kFrom, int kTo, int kRows>
TREADLE_SIMD void AddOffsets(const uint8_t* offsets, const float* row_sums, __m512 (&sums)[kRows]) {
  if constexpr (Packed::kOffsets > 0) {
    const Vec offset = Load(Floats(offsets));
    ForEach<kFrom, kTo>([&]<int r>() __attribute__((always_inline)) {
      sums[r] = Fma(offset, Broadcast(row_sums[r]), {sums[r]}).v;
    });
  }
}

// Adds rows [kFrom, kTo) of a block. A plane's dot is an integer below 2^24: joined as floats, with
// one rounding, two of them give what their integer would.
template <typename Packed, typename Form, int kOdd, int kFrom, int kTo, int kRows>
TREADLE_SIMD void AddRows(const BlockPair& at, const TileDots& dots, __m512 (&sums)[kRows]) {
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

// A step of three blocks, or four: adds one, stores the sums of the next, multiplies the one after
// that, and unpacks one that comes later, a few instructions of each at a time: tiles and vectors
// take turns otherwise. Without kAdd the first is none.
template <typename Packed, typename Form, int kOdd, bool kAdd, bool kUnpack, int kRows>
TREADLE_SIMD void RunStep(const BlockPair& added, const BlockPair& multiplied,
                          Unpacking<Packed, Form>& unpacking, TileDots& dots,
                          __m512 (&sums)[kRows]) {
  const auto add = [&]<int kFrom, int kTo>() __attribute__((always_inline)) {
    if constexpr (kAdd) {
      AddRows<Packed, Form, kOdd, kFrom * kRows / 16, kTo * kRows / 16>(added, dots, sums);
    }
  };
  const auto unpack = [&]<int I>() __attribute__((always_inline)) {
    if constexpr (kUnpack) unpacking.template Codes<I>();
  };
  LoadTile<kCodeTile>(multiplied.codes, kTileLine);
  add.template operator()<0, 2>();
  LoadTile<kActivationTile>(multiplied.rows, Form::kCodes);
  add.template operator()<2, 4>();
  unpack.template operator()<0>();
  Multiply<Packed, Form, kOdd, 0>();
  add.template operator()<4, 7>();
  unpack.template operator()<1>();
  if constexpr (Form::kPlanes == 2) {
    LoadTile<kActivationTile + 1>(multiplied.rows + Form::kPlaneBytes, Form::kCodes);
  }
  add.template operator()<7, 8>();
  if constexpr (Form::kPlanes == 2) Multiply<Packed, Form, kOdd, 1>();
  add.template operator()<8, 10>();
  StoreTile<2 - 2 * kOdd>(dots.of[1 - kOdd][0]);
  unpack.template operator()<2>();
  add.template operator()<10, 13>();
  if constexpr (Form::kPlanes == 2) StoreTile<3 - 2 * kOdd>(dots.of[1 - kOdd][1]);
  unpack.template operator()<3>();
  add.template operator()<13, 16>();
  if constexpr (kUnpack) unpacking.Finish();
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

// Adds an item to the sums, while the first two blocks of the next begin and as many blocks as it
// has are unpacked.
template <typename Packed, typename Form, int kRows>
TREADLE_SIMD void RunItem(const Item& item, const Item& next, Unpacking<Packed, Form>& unpacking,
                          TileDots& dots, __m512 (&sums)[kRows]) {
  const auto step = [&]<int kOdd>(int64_t b, const BlockPair& multiplied)
      __attribute__((always_inline)) {
    const BlockPair added = item.At<Packed, Form>(b);
    if (unpacking.More()) {
      RunStep<Packed, Form, kOdd, true, true>(added, multiplied, unpacking, dots, sums);
    } else {
      RunStep<Packed, Form, kOdd, true, false>(added, multiplied, unpacking, dots, sums);
    }
  };
  if (item.blocks < 3) unpacking.All();  // the next item may begin with them at once
  for (int64_t b = 0; b < item.blocks; b += 2) {
    const bool more = b + 2 < item.blocks;
    const Item& from = more ? item : next;
    const int64_t at = more ? b + 2 : 0;
    step.template operator()<0>(b, from.At<Packed, Form>(at));
    if (b + 1 < item.blocks) {
      step.template operator()<1>(b + 1, from.At<Packed, Form>(at + 1));
    } else {
      RunStep<Packed, Form, 1, false, false>({}, from.At<Packed, Form>(at + 1), unpacking, dots,
                                             sums);
    }
  }
}

// Adds an item to what came before it: minima, then its sums times the rows' scales.
template <typename Packed, typename Form, int kRows>
TREADLE_SIMD void AddSpan(const Item& item, const __m512 (&sums)[kRows], Vec (&ends)[kRows][1]) {
  const auto half = [&]<int kFrom, int kTo>() __attribute__((always_inline)) {
    __m512 before[kRows];
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
  if constexpr (kRows > 8) half.template operator()<8, 16>();
}

// Fetches what the results of a tile's rows will be written to. The stores of sums wait for that
// otherwise, as all stores become visible in order.
TREADLE_SIMD void FetchResults(const MatMulShare& share, int64_t row, int64_t rows, int64_t group) {
  const float* out = share.out + row * share.out_stride + group * kGroupFeatures;
  for (int64_t r = 0; r < rows && r < kTileRows; ++r, out += share.out_stride) {
    if (row + r >= 0) asm volatile("prefetchw %0" : : "m"(*out));
  }
}

// Row tiles [tile, tile_end) by all groups. Sets of blocks are unpacked to two places in turns: one
// while the other is multiplied with the first tile.
template <typename Packed, typename Form, int kRows>
TREADLE_LOOP void RunRowTiles(const MatMulInput& input, const MatMulShare& share,
                              const MatMulScratch& scratch, int64_t tile, int64_t tile_end) {
  using Codes = CodeTile<Packed, Form>;
  using Unpack = Unpacking<Packed, Form>;
  const int64_t blocks = input.k / kBlockValues;
  const int64_t most = tile_end - tile > kFewTiles ? kGroupsAtOnce : kFewGroups;
  const auto begin_unpacking = [&](const BlockSet& set, const BlockSet& ahead, uint8_t* to,
                                   int64_t g) __attribute__((always_inline)) {
    const auto group = [&](const BlockSet& of) __attribute__((always_inline)) {
      return share.weight.data + (of.group + g) * share.weight.group_bytes;
    };
    return Unpack{group(set), set.begin, set.end, to + g * (set.end - set.begin) * Codes::kBytes,
                  group(ahead) + ahead.begin * (Packed::kBytes / Packed::kBlocks)};
  };
  const auto item_at = [&](const BlockSet& set, const uint8_t* codes, int64_t t, int64_t g)
      __attribute__((always_inline)) {
    const int64_t count = set.end - set.begin;
    return Item{
        {codes + g * count * Codes::kBytes, input.tiles + (t * blocks + set.begin) * Form::kBytes},
        count};
  };
  const auto next_of = [&](const BlockSet& set, int64_t group_end) __attribute__((always_inline)) {
    return set.Next(most, group_end, blocks);
  };
  const int64_t left = share.group_end - share.group_begin;
  BlockSet set{share.group_begin, left < most ? left : most, 0, SpanEnd(0, blocks)};
  BlockSet ahead = set;
  for (int i = 0; i < kSetsAhead; ++i) ahead = next_of(ahead, INT64_MAX);
  uint8_t *codes = scratch.tile, *next_codes = codes + Codes::kSetBytes;
  for (int64_t g = 0; g < set.groups; ++g) begin_unpacking(set, set, codes, g).All();
  Unpack nothing{};
  TileDots dots;
  Item item = item_at(set, codes, tile, 0);
  Sums<kRows> none;
  RunStep<Packed, Form, 0, false, false>({}, item.At<Packed, Form>(0), nothing, dots, none);
  RunStep<Packed, Form, 1, false, false>({}, item.At<Packed, Form>(1), nothing, dots, none);
  while (set.groups > 0) {
    const BlockSet next_set = next_of(set, share.group_end);
    const bool first = set.begin == 0, last = set.end == blocks;
    for (int64_t t = tile; t < tile_end; ++t) {
      const int64_t row = t * kTileRows - input.first_lane, rows_left = input.rows - row;
      for (int64_t g = 0; g < set.groups; ++g) {
        // Results come meanwhile: of the first tile while its first blocks are multiplied, of
        // others one tile ahead.
        if (first && t == tile) FetchResults(share, row, rows_left, set.group + g);
        if (last && t + 1 < tile_end) {
          FetchResults(share, row + kTileRows, rows_left - kTileRows, set.group + g);
        }
        const Item next = g + 1 < set.groups    ? item_at(set, codes, t, g + 1)
                          : t + 1 < tile_end    ? item_at(set, codes, t + 1, 0)
                          : next_set.groups > 0 ? item_at(next_set, next_codes, tile, 0)
                                                : item;  // which is not added again
        Unpack unpacking = t == tile && g < next_set.groups
                               ? begin_unpacking(next_set, ahead, next_codes, g)
                               : nothing;
        float* kept = scratch.sums + ((t - tile) * kGroupsAtOnce + g) * kTileRows * kLanes;
        Vec ends[kRows][1];
        Sums<kRows> sums;
        if constexpr (!Form::kSpans) BeginSums<kRows, 1>(first, kept, ends);
        ForEach<0, kRows>([&]<int r>() __attribute__((always_inline)) {
          sums[r] = Form::kSpans ? _mm512_setzero_ps() : ends[r][0].v;
        });
        RunItem<Packed, Form>(item, next, unpacking, dots, sums);
        unpacking.All();
        if constexpr (Form::kSpans) {
          BeginSums<kRows, 1>(first, kept, ends);
          AddSpan<Packed, Form>(item, sums, ends);
        } else {
          ForEach<0, kRows>([&]<int r>()
                                __attribute__((always_inline)) { ends[r][0].v = sums[r]; });
        }
        EndSums<kRows, 1>(last, share, row, set.group + g, kept, ends, row < 0 ? -row : 0,
                          rows_left < kRows ? rows_left : kRows);
        item = next;
      }
    }
    set = next_set;
    ahead = next_of(ahead, INT64_MAX);
    uint8_t* const free = codes;
    codes = next_codes, next_codes = free;
  }
}

template <typename Packed, typename Form, int kRows>
void RunBlocks(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  TileShapes shapes;
  for (int sums = 0; sums < 4; ++sums) shapes.Set(sums, kRows, kTileLine);
  for (int p = 0; p < 2; ++p) shapes.Set(kActivationTile + p, kRows, Form::kCodes);
  shapes.Set(kCodeTile, Form::kCodes / 4, kTileLine);
  const ScopedTiles registers(shapes);
  const int64_t tiles = (input.first_lane + input.rows + kTileRows - 1) / kTileRows;
  const int64_t fitting = kCachedBytes / (input.k / kBlockValues * Form::kBytes);
  const int64_t at_once = fitting > 0 ? fitting : 1;
  for (int64_t t = 0; t < tiles; t += at_once) {
    RunRowTiles<Packed, Form, kRows>(input, share, scratch, t,
                                     t + at_once < tiles ? t + at_once : tiles);
  }
}

template <typename Form>
void Run(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  WithBlockLayout(share.weight.kind, [&]<typename Layout>() {
    if constexpr (!Layout::kHalves && !(Form::kNibbles && Layout::kWide)) {
      if (input.first_lane + input.rows <= kFewRows) {
        RunBlocks<Layout, Form, kFewRows>(input, share, scratch);
      } else {
        RunBlocks<Layout, Form, kTileRows>(input, share, scratch);
      }
    }
  });
}

// Stores the codes of a row, words in the order of two packed vectors, as StorePlanes and
// StoreByteCodes do.
template <typename Form>
TREADLE_SIMD void StoreRow(int8_t* codes, __m512i q) {
  constexpr bool kParts = Form::kPlanes == 2 || Form::kNibbles;
  constexpr int kBits = Form::kNibbles ? 4 : 7;
  __m512i high = q, low = q;
  if constexpr (kParts) {
    high = _mm512_srai_epi16(_mm512_add_epi16(q, _mm512_set1_epi16(1 << (kBits - 1))), kBits);
    low = _mm512_sub_epi16(q, _mm512_slli_epi16(high, kBits));
  }
  // In each 128 bits four bytes of the first vector's high parts, four of the second's, then low.
  const __m512i bytes = _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
      _mm512_packs_epi16(high, low));
  if constexpr (Form::kNibbles) {
    _mm512_storeu_si512(codes, bytes);
  } else {
    const auto store = [](int8_t * to, __m256i half) __attribute__((always_inline)) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
    };
    store(codes, _mm512_extracti64x4_epi64(bytes, 1));
    if constexpr (kParts) store(codes + Form::kPlaneBytes, _mm512_castsi512_si256(bytes));
  }
}

// As QuantizeInt8 and its like do it; constants of sixteen rows are computed at a time.
template <typename Form>
TREADLE_LOOP void QuantizeRows(const float* x, int64_t stride, int64_t lane, int64_t rows,
                               int64_t empty, int64_t k, uint8_t* tile) {
  const __m512 steps = _mm512_set1_ps(Form::kSteps);
  const __m512i most = _mm512_set1_epi16(Form::kSteps), least = _mm512_set1_epi16(-Form::kSteps);
  const auto wanted = static_cast<__mmask16>((1u << (rows + empty)) - 1);
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
        const auto round = [&](const float* p) __attribute__((always_inline)) {
          return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(p), _mm512_set1_ps(inverses[r])));
        };
        __m512i q = _mm512_packs_epi32(round(row), round(row + kLanes));
        q = _mm512_max_epi16(_mm512_min_epi16(q, most), least);
        StoreRow<Form>(reinterpret_cast<int8_t*>(tile) + (lane + r) * Form::kCodes, q);
        of_rows[r] = _mm512_madd_epi16(q, _mm512_set1_epi16(1));
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
void QuantizeTileInt8(const float* x, int64_t stride, int64_t lane, int64_t rows, int64_t empty,
                      int64_t k, uint8_t* tile) {
  QuantizeRows<Bytes>(x, stride, lane, rows, empty, k, tile);
}
void QuantizeTileInt12(const float* x, int64_t stride, int64_t lane, int64_t rows, int64_t empty,
                       int64_t k, uint8_t* tile) {
  QuantizeRows<Nibbles>(x, stride, lane, rows, empty, k, tile);
}
void QuantizeTileInt16(const float* x, int64_t stride, int64_t lane, int64_t rows, int64_t empty,
                       int64_t k, uint8_t* tile) {
  QuantizeRows<Planes>(x, stride, lane, rows, empty, k, tile);
}

}  // namespace treadle::TREADLE_ISA
