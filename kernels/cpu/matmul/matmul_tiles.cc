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

constexpr int64_t kTileBlocks = 20;        // of a group, unpacked
constexpr int64_t kGroupsAtOnce = 2;       // for each tile of rows
constexpr int64_t kCachedBytes = 1 << 20;  // of activations that stay in the cache for all groups
constexpr int64_t kPlaneBytes = kTileRows * kBlockValues;
template <int P>
constexpr int64_t kRowTileBytes = P == 1 ? kTileBlockInt8 : kTileBlockInt16;

// Registers 0 to 3 hold sums: of every other block two planes. Then come these.
constexpr int kActivationTile = 4, kCodeTile = 6;

// An unpacked block: signed codes in dwords of four k, f32 scale[16], and offset[16] if there are
// any.
template <typename Packed>
struct CodeTile {
  static constexpr int64_t kScales = 512;
  static constexpr int64_t kBytes = kScales + 64 * (1 + Packed::kOffsets);
  static_assert(kGroupsAtOnce * kTileBlocks * kBytes <= kTileBytes);

  TREADLE_SIMD static void Unpack(const uint8_t* group, int64_t block, uint8_t* tile) {
    UnpackBlockWith<Packed, kTileLine>(group, block, tile, [](uint8_t* p, auto codes) {
      const __m512i zero = _mm512_set1_epi8(static_cast<char>(Packed::kZero));
      _mm512_storeu_si512(p, _mm512_sub_epi8(codes.v, zero));
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
template <int kOdd, int kPlane>
TREADLE_SIMD void Multiply() {
  ZeroTile<2 * kOdd + kPlane>();
  AddSigned<2 * kOdd + kPlane, kActivationTile + kPlane, kCodeTile>();
}

// Adds rows [kFrom, kTo) of a block. A plane's dot is an integer below 2^24: joined as floats, with
// one rounding, two of them give what their integer would.
template <typename Packed, int P, int kOdd, int kFrom, int kTo>
TREADLE_SIMD void AddRows(const Place& at, const TileDots& dots, Sums& sums) {
  const Vec scale = Load(at.scales);
  ForEach<kFrom, kTo>([&]<int r>() __attribute__((always_inline)) {
    const auto plane = [&](int p) __attribute__((always_inline)) {
      return Vec{_mm512_cvtepi32_ps(_mm512_load_si512(dots.of[kOdd][p][r]))};
    };
    const Vec dot = P == 1 ? plane(0) : Fma(plane(1), Broadcast(128.0f), plane(0));
    Vec sum = Fma(dot, Mul(scale, Broadcast(at.row_scales[r])), {sums[r]});
    if constexpr (Packed::kOffsets > 0) {
      sum = Fma(Load(at.scales + kLanes), Broadcast(at.row_scales[kTileRows + r]), sum);
    }
    sums[r] = sum.v;
  });
}

template <typename Packed, int P>
TREADLE_SIMD void NextToMultiply(Place& at) {
  --at.left;
  at.codes += CodeTile<Packed>::kBytes;
  at.activations += kRowTileBytes<P>;
}

// A step of three blocks: adds one, stores the next, and multiplies the one after that.
template <typename Packed, int P, int kOdd>
TREADLE_SIMD void RunStep(Place& at, TileDots& dots, Sums& sums) {
  const auto add = [&]<int kFrom, int kTo>() __attribute__((always_inline)) {
    AddRows<Packed, P, kOdd, kFrom, kTo>(at, dots, sums);
  };
  const bool more = at.left > 0;
  if (more) LoadTile<kCodeTile>(at.codes, kTileLine);
  add.template operator()<0, 2>();
  if (more) LoadTile<kActivationTile>(at.activations, kBlockValues);
  add.template operator()<2, 4>();
  if (more) Multiply<kOdd, 0>();
  add.template operator()<4, 7>();
  if (P == 2 && more) LoadTile<kActivationTile + 1>(at.activations + kPlaneBytes, kBlockValues);
  add.template operator()<7, 8>();
  if (P == 2 && more) Multiply<kOdd, 1>();
  add.template operator()<8, 10>();
  StoreTile<2 - 2 * kOdd>(dots.of[1 - kOdd][0]);
  add.template operator()<10, 13>();
  if constexpr (P == 2) StoreTile<3 - 2 * kOdd>(dots.of[1 - kOdd][1]);
  add.template operator()<13, 16>();
  NextToMultiply<Packed, P>(at);
  at.scales = Floats(reinterpret_cast<const uint8_t*>(at.scales) + CodeTile<Packed>::kBytes);
  at.row_scales = Floats(reinterpret_cast<const uint8_t*>(at.row_scales) + kRowTileBytes<P>);
}

// The first step of the first two blocks.
template <typename Packed, int P, int kOdd>
TREADLE_SIMD void Begin(Place& at) {
  if (at.left <= 0) return;
  LoadTile<kCodeTile>(at.codes, kTileLine);
  LoadTile<kActivationTile>(at.activations, kBlockValues);
  Multiply<kOdd, 0>();
  if constexpr (P == 2) {
    LoadTile<kActivationTile + 1>(at.activations + kPlaneBytes, kBlockValues);
    Multiply<kOdd, 1>();
  }
  NextToMultiply<Packed, P>(at);
}

// Sixteen rows, of which [first, end) are wanted, over the blocks of a code tile. rows: theirs from
// block range.begin on.
template <typename Packed, int P>
TREADLE_LOOP void RunTile(const MatMulShare& share, const BlockRange& range, int64_t first,
                          int64_t end, const uint8_t* codes, const uint8_t* rows, float* scratch) {
  const int64_t blocks = range.end - range.begin;
  Place at = {codes, rows, blocks, Floats(codes + CodeTile<Packed>::kScales),
              Floats(rows + P * kPlaneBytes)};
  TileDots dots;
  Vec ends[kTileRows][1];
  BeginSums<kTileRows, 1>(range.first, scratch, ends);
  Sums sums;
  ForEach<0, kTileRows>([&]<int r>() __attribute__((always_inline)) { sums[r] = ends[r][0].v; });
  Begin<Packed, P, 0>(at);
  StoreTile<0>(dots.of[0][0]);
  if constexpr (P == 2) StoreTile<1>(dots.of[0][1]);
  Begin<Packed, P, 1>(at);
  for (int64_t b = 0; b < blocks; b += 2) {
    RunStep<Packed, P, 0>(at, dots, sums);
    if (b + 1 == blocks) break;
    RunStep<Packed, P, 1>(at, dots, sums);
  }
  ForEach<0, kTileRows>([&]<int r>() __attribute__((always_inline)) { ends[r][0].v = sums[r]; });
  EndSums<kTileRows, 1>(range.last, share, range.row, range.group, scratch, ends, first, end);
}

// Row tiles [tile, tile_end) by all groups.
template <typename Packed, int P>
void RunRowTiles(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
                 int64_t tile, int64_t tile_end) {
  using Codes = CodeTile<Packed>;
  const int64_t blocks = input.k / kBlockValues;
  for (int64_t group = share.group_begin; group < share.group_end; group += kGroupsAtOnce) {
    const int64_t left = share.group_end - group;
    const int64_t groups = left < kGroupsAtOnce ? left : kGroupsAtOnce;
    for (int64_t begin = 0; begin < blocks; begin += kTileBlocks) {
      const int64_t end = begin + kTileBlocks < blocks ? begin + kTileBlocks : blocks;
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
      const int64_t lines = kTileBlocks * block_bytes / 64 / (tile_end - tile) + 1;
      for (int64_t t = tile; t < tile_end; ++t) {
        // While these blocks are multiplied, the next ones come.
        for (int64_t g = 0; g < groups; ++g) {
          const uint8_t* from = next + g * share.weight.group_bytes + (t - tile) * lines * 64;
          for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(from + 64 * line, 0, 2);
        }
        const int64_t row = t * kTileRows - input.first_lane;
        const int64_t rows_left = input.rows - row;
        const uint8_t* rows = input.tiles + (t * blocks + begin) * kRowTileBytes<P>;
        for (int64_t g = 0; g < groups; ++g) {
          const BlockRange range = {begin, end, row, group + g, begin == 0, end == blocks};
          float* sums = scratch.sums + ((t - tile) * kGroupsAtOnce + g) * kTileRows * kLanes;
          RunTile<Packed, P>(share, range, row < 0 ? -row : 0,
                             rows_left < kTileRows ? rows_left : kTileRows,
                             scratch.tile + g * (end - begin) * Codes::kBytes, rows, sums);
        }
      }
    }
  }
}

template <typename Packed, int P>
void RunBlocks(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  TileShapes shapes;
  for (int sums = 0; sums < 4; ++sums) shapes.Set(sums, kTileRows, kTileLine);
  for (int p = 0; p < 2; ++p) shapes.Set(kActivationTile + p, kTileRows, kBlockValues);
  shapes.Set(kCodeTile, kBlockValues / 4, kTileLine);
  const ScopedTiles registers(shapes);
  const int64_t tiles = (input.first_lane + input.rows + kTileRows - 1) / kTileRows;
  const int64_t fitting = kCachedBytes / (input.k / kBlockValues * kRowTileBytes<P>);
  const int64_t at_once = fitting > 0 ? fitting : 1;
  for (int64_t t = 0; t < tiles; t += at_once) {
    RunRowTiles<Packed, P>(input, share, scratch, t, t + at_once < tiles ? t + at_once : tiles);
  }
}

template <int P>
void Run(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  WithBlockLayout(share.weight.kind, [&]<typename Layout>() {
    if constexpr (!Layout::kHalves) RunBlocks<Layout, P>(input, share, scratch);
  });
}

template <int P>
void QuantizeRow(const float* x, int64_t k, int64_t lane, uint8_t* tile) {
  for (int64_t b = 0; b < k / kBlockValues; ++b, tile += kRowTileBytes<P>) {
    __m256i q[4];
    const ActivationBlock block = QuantizeBlock<P>(x + b * kBlockValues, q);
    int8_t* codes = reinterpret_cast<int8_t*>(tile) + lane * kBlockValues;
    if constexpr (P == 1) {
      StoreByteCodes(codes, q);
    } else {
      StorePlanes(codes, codes + kPlaneBytes, q);
    }
    float* scales = reinterpret_cast<float*>(tile + P * kPlaneBytes);
    scales[lane] = block.scale;
    scales[kTileRows + lane] = block.scaled_sum;
  }
}

template <int P>
void QuantizeRows(const float* x, int64_t stride, int64_t lane, int64_t rows, int64_t k,
                  uint8_t* tile) {
  for (int64_t row = 0; row < rows; ++row) QuantizeRow<P>(x + row * stride, k, lane + row, tile);
}

}  // namespace

void MatMulTilesInt8(const MatMulInput& input, const MatMulShare& share,
                     const MatMulScratch& scratch) {
  Run<1>(input, share, scratch);
}
void MatMulTilesInt16(const MatMulInput& input, const MatMulShare& share,
                      const MatMulScratch& scratch) {
  Run<2>(input, share, scratch);
}
void QuantizeTileInt8(const float* x, int64_t stride, int64_t lane, int64_t rows, int64_t k,
                      uint8_t* tile) {
  QuantizeRows<1>(x, stride, lane, rows, k, tile);
}
void QuantizeTileInt16(const float* x, int64_t stride, int64_t lane, int64_t rows, int64_t k,
                       uint8_t* tile) {
  QuantizeRows<2>(x, stride, lane, rows, k, tile);
}

}  // namespace treadle::TREADLE_ISA
