// Attention of ComputeMode::kBf16 on AMX: sixteen queries against a block of 64 positions at a
// time. A block's K and V are rounded to bf16 once for all tiles of an item, in pairs of two
// features (K) or of two positions (V), as the tile products read them.
//
// Compiled for AVX-512 only; instructions of BF16 are named.
#include <cstring>

#include "kernels/cpu/matmul/tile_registers.h"
#include "kernels/cpu/ops/attention_item.h"

namespace treadle::TREADLE_ISA {
namespace {

// Registers: four of sums, then rows of q or p, then K or V.
constexpr int kRowTile = 4, kPairTile = 5;
constexpr int64_t kPairs = kLanes * 2;  // bf16 of a register's row

constexpr int64_t PaddedChain(int64_t n) {
  return (n + kChainTerms - 1) / kChainTerms * kChainTerms;
}

// The item's part of Scratch::tiles.
struct TileScratch {
  uint16_t* k;  // [padded chain / 2, kBlock, 2]
  uint16_t* v;  // [kBlock / 2, padded_dim, 2]
  uint16_t* q;  // [queries, padded chain], queries padded to tiles
  uint16_t* p;  // [kMaxQueries, kBlock]
  int64_t chain;
  int64_t padded_dim;
};

TileScratch CarveTiles(const AttentionArguments& a, const Scratch& scratch) {
  TileScratch s;
  s.chain = PaddedChain(a.head_dim);
  s.padded_dim = Padded(a.value_dim);
  s.k = reinterpret_cast<uint16_t*>(scratch.tiles);
  s.v = s.k + kBlock * s.chain;
  s.q = s.v + kBlock * s.padded_dim;
  s.p = s.q + Padded(a.rows * a.group) * s.chain;
  return s;
}

// Rounds 16 values of each of two rows, side by side: lane i of both, then lane i + 1.
TREADLE_SIMD __m512i Interleaved(Vec even, Vec odd) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, RoundPair(even.v, odd.v));
}

// The rows of q, zeros behind them.
void RoundQueries(const AttentionArguments& a, const Scratch& scratch, const TileScratch& s) {
  const int64_t queries = a.rows * a.group;
  std::memset(s.q, 0, static_cast<size_t>(2 * Padded(queries) * s.chain));
  for (int64_t query = 0; query < queries; ++query) {
    const float* q = scratch.q + query * a.head_dim;
    for (int64_t i = 0; i < a.head_dim; i += kPairs) {
      const int64_t left = a.head_dim - i;
      const __m512i pair = RoundPair(
          LoadFirst(q + i, left).v,
          left > kLanes ? LoadFirst(q + i + kLanes, left - kLanes).v : _mm512_setzero_ps());
      _mm512_storeu_si512(s.q + query * s.chain + i, pair);
    }
  }
}

// Rounds 16 values of two rows to `out`, and fetches the next block's, which are at `next`, if that
// is not null.
template <typename T>
TREADLE_SIMD __m512i RoundRows(const T* even, const T* odd, const T* next, int64_t stride,
                               uint16_t* out) {
  const __m512i pair = Interleaved(Load(even), Load(odd));
  _mm512_storeu_si512(out, pair);
  if (next != nullptr) {
    Prefetch<1>(next);
    Prefetch<1>(next + stride);
  }
  return pair;
}

template <typename T>
void RoundKeys(const AttentionArguments& a, const Block<T>& block, int64_t groups,
               const TileScratch& s) {
  for (int64_t group = 0; group < groups; ++group) {
    const T* k = block.k[group];
    const T* next = block.next == nullptr ? nullptr : block.next->k[group];
    uint16_t* out = s.k + group * kPairs;
    int64_t d = 0;
#pragma GCC unroll 4
    for (; d + 1 < a.head_dim; d += 2, k += 2 * block.k_stride, out += 2 * kBlock) {
      RoundRows(k, k + block.k_stride, next, block.k_stride, out);
      if (next != nullptr) next += 2 * block.k_stride;
    }
    for (; d < s.chain; d += 2, out += 2 * kBlock) {
      const Vec even = d < a.head_dim ? Load(k) : Zero();
      _mm512_storeu_si512(out, Interleaved(even, Zero()));
    }
  }
}

// Zeros behind what is seen. False if a value is infinite or NaN, which times 0 is not 0.
template <typename T>
bool RoundValues(const AttentionArguments& a, const Block<T>& block, int64_t seen,
                 const TileScratch& s) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i largest = _mm512_setzero_si512();
  const auto take = [&](__m512i pair) {
    largest = _mm512_max_epu16(largest, _mm512_and_si512(pair, magnitude));
  };
  const int64_t stride = block.v_stride;
  for (int64_t position = 0; position < PaddedChain(seen); position += 2) {
    const int64_t group = position / kLanes, at = position % kLanes * stride;
    const T* v = block.v[group] + at;
    const T* next = block.next == nullptr ? nullptr : block.next->v[group] + at;
    uint16_t* out = s.v + position * s.padded_dim;
    int64_t i = 0;
    if (position + 1 < seen) {
      for (; i + kLanes <= a.value_dim; i += kLanes) {
        take(RoundRows(v + i, v + i + stride, next == nullptr ? nullptr : next + i, stride,
                       out + 2 * i));
      }
    }
    for (; i < a.value_dim; i += kLanes) {
      const int64_t lanes = a.value_dim - i < kLanes ? a.value_dim - i : kLanes;
      const Vec even = position < seen ? LoadLanes(v + i, lanes) : Zero();
      const Vec odd = position + 1 < seen ? LoadLanes(v + i + stride, lanes) : Zero();
      const __m512i pair = Interleaved(even, odd);
      take(pair);
      _mm512_storeu_si512(out + 2 * i, pair);
    }
  }
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0;
}

// The tile's p, rounded, and 0 for what a query does not see.
void RoundWeights(const Tile& tile, int64_t groups, const TileScratch& s) {
  for (int query = 0; query < tile.queries; ++query) {
    const float* p = tile.weights + query * kBlock;
    const int64_t from = tile.from[query], limit = tile.limit[query];
    const auto seen = [&](int64_t group) {
      if (group >= groups) return Zero();
      const Vec x = Load(p + group * kLanes);
      const int64_t first = group * kLanes;
      if (from <= first && first + kLanes <= limit) return x;
      return Select(FirstLanes(from - first), Zero(), Select(FirstLanes(limit - first), x, Zero()));
    };
    for (int64_t group = 0; group < kGroups; group += 2) {
      _mm512_storeu_si512(s.p + query * kBlock + group * kLanes,
                          RoundPair(seen(group).v, seen(group + 1).v));
    }
  }
}

// Adds rows [16][32] * pairs [16][16][2] of each of `sums` columns of pairs, which lie side by
// side.
TREADLE_SIMD void AddTiles(const uint16_t* rows, int64_t row_bytes, const uint16_t* pairs,
                           int64_t pair_bytes, int64_t sums) {
  LoadTile<kRowTile>(rows, row_bytes);
  const auto add = [&]<int kSum>() {
    if (kSum >= sums) return;
    LoadTile<kPairTile>(pairs + kSum * kPairs, pair_bytes);
    AddBf16<kSum, kRowTile, kPairTile>();
  };
  add.template operator()<0>();
  add.template operator()<1>();
  add.template operator()<2>();
  add.template operator()<3>();
}
TREADLE_SIMD void ZeroTiles() {
  ZeroTile<0>();
  ZeroTile<1>();
  ZeroTile<2>();
  ZeroTile<3>();
}
// The first `sums` tiles of 16 columns each.
TREADLE_SIMD void StoreTiles(float* out, int64_t row_bytes, int64_t sums) {
  if (sums > 0) StoreTile<0>(out, row_bytes);
  if (sums > 1) StoreTile<1>(out + kLanes, row_bytes);
  if (sums > 2) StoreTile<2>(out + 2 * kLanes, row_bytes);
  if (sums > 3) StoreTile<3>(out + 3 * kLanes, row_bytes);
}

// max, sum and vector of one block for the tile's queries.
template <typename T>
void TileProducts(const Tile& tile, const Block<T>& block, const TileScratch& s) {
  const int64_t groups = (tile.limit[tile.queries - 1] + kLanes - 1) / kLanes;
  constexpr int64_t kFloat = sizeof(float), kHalf = sizeof(uint16_t);
  ZeroTiles();
  for (int64_t d = 0; d < s.chain; d += kChainTerms) {
    AddTiles(s.q + tile.first * s.chain + d, kHalf * s.chain, s.k + d * kBlock, kFloat * kBlock,
             groups);
  }
  StoreTiles(tile.weights, kFloat * kBlock, groups);
  const bool codes = block.k_scales[0] != nullptr;
  if (codes) ScalePositions(tile, groups, block.k_scales);
  Softmax(tile, groups);
  if (codes) ScalePositions(tile, groups, block.v_scales);
  RoundWeights(tile, groups, s);
  for (int64_t feature = 0; feature < s.padded_dim; feature += kGroups * kLanes) {
    const int64_t left = (s.padded_dim - feature) / kLanes;
    const int64_t sums = left < kGroups ? left : kGroups;
    ZeroTiles();
    for (int64_t position = 0; position < groups * kLanes; position += kChainTerms) {
      AddTiles(s.p + position, kHalf * kBlock, s.v + position * s.padded_dim + 2 * feature,
               kFloat * s.padded_dim, sums);
    }
    StoreTiles(tile.vector + feature, kFloat * s.padded_dim, sums);
  }
}

}  // namespace

void AttendBf16OnTiles(const AttentionArguments& a) {
  const Scratch scratch = Carve(a.scratch, a.rows * a.group, a.head_dim);
  const TileScratch s = CarveTiles(a, scratch);
  TileShapes shapes;
  for (int tile = 0; tile <= kPairTile; ++tile) shapes.Set(tile, kMaxQueries, kTileLine);
  const ScopedTiles tiles(shapes);
  ScaleQueries(a, scratch.q);
  RoundQueries(a, scratch, s);
  if (a.partials == nullptr) Clear(a, scratch.running);
  WithCacheType(a.dtype, [&]<typename T>() {
    ForEachBlock<T>(a, [&](const Block<T>& block, int64_t index, int64_t seen) {
      const auto attend = [&](const auto& rounded) {
        RoundKeys(a, rounded, (seen + kLanes - 1) / kLanes, s);
        if (RoundValues(a, rounded, seen, s)) {
          ItemOnTiles(a, scratch, index, [&](const Tile& tile) { TileProducts(tile, rounded, s); });
        } else {
          ItemBlock(a, scratch, Convert(block, a, scratch, seen), index);
        }
      };
      if constexpr (sizeof(T) > 1) {
        if (a.v != nullptr) return attend(block);
      }
      attend(Convert(block, a, scratch, seen));
    });
  });
  if (a.partials == nullptr) Finish(a, scratch.running);
}

}  // namespace treadle::TREADLE_ISA
