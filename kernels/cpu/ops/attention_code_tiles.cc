// Attention of codes on AMX (attention_codes.h): sixteen queries against a block of 64 positions at
// a time. Compiled for AVX-512 only.
#include "kernels/cpu/matmul/tile_registers.h"
#include "kernels/cpu/ops/attention_codes.h"

namespace treadle::TREADLE_ISA {
namespace {

// Registers: sums of the high and the low digits of two groups of columns, then rows of both
// digits, then fours of two groups.
constexpr int kHighTile = 4, kLowTile = 5, kFoursTile = 6;
constexpr int64_t kFours = 64;  // bytes of a group of 16 columns: four of each

// A block's codes with equal strides, and sums of its products, in CodeBlock::spare.
struct TileBlocks {
  int8_t* k;            // [chain / 4, kBlock, 4]
  int8_t* v;            // [kBlock / 4, chain, 4], positions in the order of WeightFour
  int32_t *high, *low;  // [kMaxQueries, kBlock]: sums
};

TileBlocks CarveBlocks(const CodeBlock& s) {
  TileBlocks t;
  t.k = reinterpret_cast<int8_t*>(s.spare);
  t.v = t.k + kBlock * s.chain;
  t.high = reinterpret_cast<int32_t*>(t.v + kBlock * s.chain);
  t.low = t.high + kMaxQueries * kBlock;
  return t;
}

// Features that there are not keep what lies there, for queries have zeros.
void CopyKeys(const AttentionArguments& a, const Block<int8_t>& block, int64_t groups,
              const TileBlocks& t) {
  for (int64_t group = 0; group < groups; ++group) {
    const int8_t* k = block.k[group];
    const int8_t* next = block.next == nullptr ? k : block.next->k[group];
    int8_t* to = t.k + group * kFours;
    for (int64_t d = 0; d < a.head_dim; d += 4) {
      _mm512_storeu_si512(to, _mm512_loadu_si512(k));
      Prefetch<1>(next);
      k += block.k_stride;
      next += block.k_stride;
      to += 4 * kBlock;
    }
  }
}
// Positions that nobody sees likewise, for weights have zeros.
void CopyValues(const AttentionArguments& a, const Block<int8_t>& block, int64_t groups,
                int64_t chain, const TileBlocks& t) {
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t i = 0; i < kLanes / 4; ++i) {
      const int8_t* const v = block.v[group] + i * block.v_stride;
      const int8_t* const next =
          block.next == nullptr ? v : block.next->v[group] + i * block.v_stride;
      int8_t* const to = t.v + WeightFour(group, i) * 4 * chain;
      for (int64_t at = 0; at < 4 * a.value_dim; at += kFours) {
        _mm512_storeu_si512(to + at, _mm512_loadu_si512(v + at));
        Prefetch<1>(next + at);
      }
    }
  }
}

// Sums of factors' digits [16][count] * fours, [count / 4][16 columns][4], of a group of columns
// and, if there is a `second`, of the one beside it, to both [kMaxQueries, kBlock].
template <bool kSigned>
TREADLE_SIMD void SumDigits(const uint8_t* rows, int64_t count, const int8_t* fours,
                            int64_t fours_bytes, bool second, int32_t* high_sums,
                            int32_t* low_sums) {
  const auto add = [&]<int kSum, int kDigit, int kColumns>() {
    if constexpr (kSigned) {
      AddSigned<kSum, kDigit, kColumns>();
    } else {
      AddSignedCodes<kSum, kDigit, kColumns>();
    }
  };
  ForEach<0, 4>([]<int kSum>() { ZeroTile<kSum>(); });
  for (int64_t at = 0; at < count; at += kRowCodes, fours += kRowCodes / 4 * fours_bytes) {
    LoadTile<kHighTile>(rows + at, 2 * count);
    LoadTile<kLowTile>(rows + count + at, 2 * count);
    LoadTile<kFoursTile>(fours, fours_bytes);
    add.template operator()<0, kHighTile, kFoursTile>();
    add.template operator()<1, kLowTile, kFoursTile>();
    if (!second) continue;
    LoadTile<kFoursTile + 1>(fours + kFours, fours_bytes);
    add.template operator()<2, kHighTile, kFoursTile + 1>();
    add.template operator()<3, kLowTile, kFoursTile + 1>();
  }
  constexpr int64_t kSumBytes = kBlock * sizeof(int32_t);
  StoreTile<0>(high_sums, kSumBytes);
  StoreTile<1>(low_sums, kSumBytes);
  if (!second) return;
  StoreTile<2>(high_sums + kLanes, kSumBytes);
  StoreTile<3>(low_sums + kLanes, kSumBytes);
}

// 16 sums of both digits.
TREADLE_SIMD Vec JoinedSums(const TileBlocks& t, int64_t at) {
  return ToFloat(CodeSums{_mm512_loadu_si512(t.high + at), _mm512_loadu_si512(t.low + at)});
}

// max, sum and vector of one block for the tile's queries.
void TileProducts(const Tile& tile, const CodeBlock& s, const TileBlocks& t) {
  const int64_t groups = (tile.limit[tile.queries - 1] + kLanes - 1) / kLanes;
  for (int64_t group = 0; group < groups; group += 2) {
    SumDigits<true>(s.q + tile.first * 2 * s.chain, s.chain, t.k + group * kFours, 4 * kBlock,
                    group + 1 < groups, t.high + group * kLanes, t.low + group * kLanes);
  }
  for (int query = 0; query < tile.queries; ++query) {
    for (int64_t group = 0; group < groups; ++group) {
      StoreScores(tile, query, group, JoinedSums(t, query * kBlock + group * kLanes), s.scales,
                  s.q_steps[tile.first + query]);
    }
  }
  Softmax(tile, groups);
  float steps[kMaxQueries];
  SetWeights(tile, groups, s, steps);
  for (int64_t feature = 0; feature < tile.padded_dim; feature += kBlock) {
    const int64_t left = tile.padded_dim - feature, lanes = left < kBlock ? left : kBlock;
    for (int64_t at = 0; at < lanes; at += 2 * kLanes) {
      SumDigits<false>(s.p, kBlock, t.v + 4 * (feature + at), 4 * s.chain, at + kLanes < lanes,
                       t.high + at, t.low + at);
    }
    for (int query = 0; query < tile.queries; ++query) {
      const Vec step = Broadcast(steps[query]);
      for (int64_t at = 0; at < lanes; at += kLanes) {
        Store(tile.vector + query * tile.padded_dim + feature + at,
              Mul(JoinedSums(t, query * kBlock + at), step));
      }
    }
  }
}

}  // namespace

void AttendCodesOnTiles(const AttentionArguments& a) {
  const Scratch scratch = Carve(a.scratch, a.rows * a.group, a.head_dim);
  CodeBlock s = CarveCodes(a, scratch);
  const TileBlocks t = CarveBlocks(s);
  TileShapes shapes;
  for (int tile = 0; tile <= kFoursTile + 1; ++tile) shapes.Set(tile, kMaxQueries, kTileLine);
  const ScopedTiles tiles(shapes);
  ScaleQueries(a, scratch.q);
  SetQueries</*kSums=*/false>(a, scratch, s);
  if (a.partials == nullptr) Clear(a, scratch.running);
  ForEachBlock<int8_t>(a, [&](const Block<int8_t>& block, int64_t index, int64_t seen) {
    const int64_t groups = (seen + kLanes - 1) / kLanes;
    CopyKeys(a, block, groups, t);
    CopyValues(a, block, groups, s.chain, t);
    SetScales(block, seen, s.scales);
    ItemOnTiles(a, scratch, index, [&](const Tile& tile) { TileProducts(tile, s, t); });
  });
  if (a.partials == nullptr) Finish(a, scratch.running);
}

}  // namespace treadle::TREADLE_ISA
