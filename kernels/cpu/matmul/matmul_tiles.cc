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

constexpr int64_t kGroupsAtOnce = 2;       // for each tile of rows
constexpr int64_t kCachedBytes = 1 << 20;  // of activations that stay in the cache for all groups

// A form of 32 activations of 16 rows: planes of so many bytes a row, a product each.
template <int kPlaneCount, int64_t kRowCodes, int32_t kStepCount>
struct RowsForm {
  static constexpr int kPlanes = kPlaneCount;
  static constexpr int64_t kCodes = kRowCodes;
  static constexpr int32_t kSteps = kStepCount;
  static constexpr bool kNibbles = kCodes == 2 * kBlockValues;
  static constexpr int64_t kPlaneBytes = kTileRows * kCodes;
  static constexpr int64_t kBytes = kPlanes * kPlaneBytes + kTileRows * 8;
  // Blocks of a group that are unpacked at a time: half of the L1 cache.
  static constexpr int64_t kBlocks = 640 / kCodes;
};
using Bytes = RowsForm<1, kBlockValues, kInt8Steps>;
using Planes = RowsForm<2, kBlockValues, kInt16Steps>;
// Rows of kInt12: high, then low, which are multiplied with 16 * code, then code.
using Nibbles = RowsForm<1, 2 * kBlockValues, kInt12Steps>;
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
  static_assert(kGroupsAtOnce * Form::kBlocks * kBytes <= kTileBytes);

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

// Where a product is. A block goes through three steps: multiplied into tile registers, stored, and
// added. All of them go on at once, of three blocks, a few instructions of each at a time: tiles
// and vectors take turns otherwise.
struct Place {
  const uint8_t* codes;  // of the block that is multiplied next
  const uint8_t* activations;
  int64_t left;         // blocks from that one on
  const float* scales;  // of the block that is added
  const float* row_scales;
};

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

// Adds rows [kFrom, kTo) of a block. A plane's dot is an integer below 2^24: joined as floats, with
// one rounding, two of them give what their integer would.
template <typename Packed, typename Form, int kOdd, int kFrom, int kTo>
TREADLE_SIMD void AddRows(const Place& at, const TileDots& dots, Sums& sums) {
  const Vec scale = Load(at.scales);
  ForEach<kFrom, kTo>([&]<int r>() __attribute__((always_inline)) {
    const auto plane = [&](int p) __attribute__((always_inline)) {
      return Vec{_mm512_cvtepi32_ps(_mm512_load_si512(dots.of[kOdd][p][r]))};
    };
    const Vec dot = Form::kPlanes == 1 ? plane(0) : Fma(plane(1), Broadcast(128.0f), plane(0));
    Vec sum = Fma(dot, Mul(scale, Broadcast(at.row_scales[r])), {sums[r]});
    if constexpr (Packed::kOffsets > 0) {
      sum = Fma(Load(at.scales + kLanes), Broadcast(at.row_scales[kTileRows + r]), sum);
    }
    sums[r] = sum.v;
  });
}

template <typename Packed, typename Form>
TREADLE_SIMD void NextToMultiply(Place& at) {
  --at.left;
  at.codes += CodeTile<Packed, Form>::kBytes;
  at.activations += Form::kBytes;
}

// A step of three blocks: adds one, stores the next, and multiplies the one after that.
template <typename Packed, typename Form, int kOdd>
TREADLE_SIMD void RunStep(Place& at, TileDots& dots, Sums& sums) {
  const auto add = [&]<int kFrom, int kTo>() __attribute__((always_inline)) {
    AddRows<Packed, Form, kOdd, kFrom, kTo>(at, dots, sums);
  };
  const bool more = at.left > 0;
  if (more) LoadTile<kCodeTile>(at.codes, kTileLine);
  add.template operator()<0, 2>();
  if (more) LoadTile<kActivationTile>(at.activations, Form::kCodes);
  add.template operator()<2, 4>();
  if (more) Multiply<Packed, Form, kOdd, 0>();
  add.template operator()<4, 7>();
  if (Form::kPlanes == 2 && more) {
    LoadTile<kActivationTile + 1>(at.activations + Form::kPlaneBytes, Form::kCodes);
  }
  add.template operator()<7, 8>();
  if (Form::kPlanes == 2 && more) Multiply<Packed, Form, kOdd, 1>();
  add.template operator()<8, 10>();
  StoreTile<2 - 2 * kOdd>(dots.of[1 - kOdd][0]);
  add.template operator()<10, 13>();
  if constexpr (Form::kPlanes == 2) StoreTile<3 - 2 * kOdd>(dots.of[1 - kOdd][1]);
  add.template operator()<13, 16>();
  NextToMultiply<Packed, Form>(at);
  at.scales = Floats(reinterpret_cast<const uint8_t*>(at.scales) + CodeTile<Packed, Form>::kBytes);
  at.row_scales = Floats(reinterpret_cast<const uint8_t*>(at.row_scales) + Form::kBytes);
}

// The first step of the first two blocks.
template <typename Packed, typename Form, int kOdd>
TREADLE_SIMD void Begin(Place& at) {
  if (at.left <= 0) return;
  LoadTile<kCodeTile>(at.codes, kTileLine);
  LoadTile<kActivationTile>(at.activations, Form::kCodes);
  Multiply<Packed, Form, kOdd, 0>();
  if constexpr (Form::kPlanes == 2) {
    LoadTile<kActivationTile + 1>(at.activations + Form::kPlaneBytes, Form::kCodes);
    Multiply<Packed, Form, kOdd, 1>();
  }
  NextToMultiply<Packed, Form>(at);
}

// Sixteen rows, of which [first, end) are wanted, over the blocks of a code tile. rows: theirs from
// block range.begin on.
template <typename Packed, typename Form>
TREADLE_LOOP void RunTile(const MatMulShare& share, const BlockRange& range, int64_t first,
                          int64_t end, const uint8_t* codes, const uint8_t* rows, float* scratch) {
  const int64_t blocks = range.end - range.begin;
  Place at = {codes, rows, blocks, Floats(codes + CodeTile<Packed, Form>::kScales),
              Floats(rows + Form::kPlanes * Form::kPlaneBytes)};
  TileDots dots;
  Vec ends[kTileRows][1];
  BeginSums<kTileRows, 1>(range.first, scratch, ends);
  Sums sums;
  ForEach<0, kTileRows>([&]<int r>() __attribute__((always_inline)) { sums[r] = ends[r][0].v; });
  Begin<Packed, Form, 0>(at);
  StoreTile<0>(dots.of[0][0]);
  if constexpr (Form::kPlanes == 2) StoreTile<1>(dots.of[0][1]);
  Begin<Packed, Form, 1>(at);
  for (int64_t b = 0; b < blocks; b += 2) {
    RunStep<Packed, Form, 0>(at, dots, sums);
    if (b + 1 == blocks) break;
    RunStep<Packed, Form, 1>(at, dots, sums);
  }
  ForEach<0, kTileRows>([&]<int r>() __attribute__((always_inline)) { ends[r][0].v = sums[r]; });
  EndSums<kTileRows, 1>(range.last, share, range.row, range.group, scratch, ends, first, end);
}

// Row tiles [tile, tile_end) by all groups.
template <typename Packed, typename Form>
void RunRowTiles(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
                 int64_t tile, int64_t tile_end) {
  using Codes = CodeTile<Packed, Form>;
  const int64_t blocks = input.k / kBlockValues;
  for (int64_t group = share.group_begin; group < share.group_end; group += kGroupsAtOnce) {
    const int64_t left = share.group_end - group;
    const int64_t groups = left < kGroupsAtOnce ? left : kGroupsAtOnce;
    for (int64_t begin = 0; begin < blocks; begin += Form::kBlocks) {
      const int64_t end = begin + Form::kBlocks < blocks ? begin + Form::kBlocks : blocks;
      uint8_t* unpacked = scratch.tile;
      for (int64_t g = 0; g < groups; ++g) {
        const uint8_t* packed = share.weight.data + (group + g) * share.weight.group_bytes;
        for (int64_t b = begin; b < end; ++b, unpacked += Codes::kBytes) {
          Codes::Unpack(packed, b, unpacked);
        }
      }
      const bool last = end == blocks;
      const int64_t block_bytes = share.weight.group_bytes / blocks;
      const uint8_t* next = share.weight.data +
                            (last ? group + groups : group) * share.weight.group_bytes +
                            (last ? 0 : end * block_bytes);
      const int64_t lines = Form::kBlocks * block_bytes / 64 / (tile_end - tile) + 1;
      for (int64_t t = tile; t < tile_end; ++t) {
        // While these blocks are multiplied, the next ones come.
        for (int64_t g = 0; g < groups; ++g) {
          const uint8_t* from = next + g * share.weight.group_bytes + (t - tile) * lines * 64;
          for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(from + 64 * line, 0, 2);
        }
        const int64_t row = t * kTileRows - input.first_lane;
        const int64_t rows_left = input.rows - row;
        const uint8_t* rows = input.tiles + (t * blocks + begin) * Form::kBytes;
        for (int64_t g = 0; g < groups; ++g) {
          const BlockRange range = {begin, end, row, group + g, begin == 0, end == blocks};
          float* sums = scratch.sums + ((t - tile) * kGroupsAtOnce + g) * kTileRows * kLanes;
          RunTile<Packed, Form>(share, range, row < 0 ? -row : 0,
                                rows_left < kTileRows ? rows_left : kTileRows,
                                scratch.tile + g * (end - begin) * Codes::kBytes, rows, sums);
        }
      }
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

// A block of each row as QuantizeBlock does it; constants of sixteen rows are computed at a time.
template <typename Form>
TREADLE_LOOP void QuantizeRows(const float* x, int64_t stride, int64_t lane, int64_t rows,
                               int64_t k, uint8_t* tile) {
  const __m512 steps = _mm512_set1_ps(Form::kSteps);
  const __m512i most = _mm512_set1_epi32(Form::kSteps), least = _mm512_set1_epi32(-Form::kSteps);
  const auto wanted = static_cast<__mmask16>((1u << rows) - 1);
  for (int64_t b = 0; b < k / kBlockValues; ++b, x += kBlockValues, tile += Form::kBytes) {
    __m512i of_rows[kTileRows] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
      const float* row = x + r * stride;
      of_rows[r] = _mm512_max_epi32(_mm512_and_si512(_mm512_loadu_si512(row), magnitude),
                                    _mm512_and_si512(_mm512_loadu_si512(row + 16), magnitude));
    }
    const __m512 absmax = _mm512_castsi512_ps(ReduceEach(
        of_rows, [](__m512i a, __m512i c)
                     __attribute__((always_inline)) { return _mm512_max_epi32(a, c); }));
    const __mmask16 scaled =
        _mm512_cmp_ps_mask(absmax, _mm512_set1_ps(0x1p-100f), _CMP_NLT_UQ);  // NaN, too
    const __m512 scale = _mm512_maskz_div_ps(scaled, absmax, steps);
    alignas(64) float inverses[kTileRows];
    _mm512_store_ps(inverses, _mm512_maskz_div_ps(scaled, steps, absmax));
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = x + r * stride;
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
        of_rows,
        [](__m512i a, __m512i c) __attribute__((always_inline)) { return _mm512_add_epi32(a, c); });
    float* scales = reinterpret_cast<float*>(tile + Form::kPlanes * Form::kPlaneBytes) + lane;
    _mm512_mask_storeu_ps(scales, wanted, scale);
    _mm512_mask_storeu_ps(scales + kTileRows, wanted,
                          _mm512_mul_ps(scale, _mm512_cvtepi32_ps(sums)));
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
