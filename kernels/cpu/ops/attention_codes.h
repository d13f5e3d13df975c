// Attention of a cache of codes (KvLayout): exact sums over fours of features (K) and of positions
// (V), which are read where they lie.
//
// AVX2 multiplies 16-bit words. AVX-512 and AMX multiply bytes, so a query's code is 128 * high +
// low in two signed bytes there, and a weight's in two unsigned ones. Only for sources that are
// compiled once per instruction set; see simd.h.
#pragma once

#include "kernels/cpu/matmul/int8_lanes.h"
#include "kernels/cpu/ops/attention_item.h"

namespace treadle::TREADLE_ISA {
namespace {

inline constexpr float kQuerySteps = 127 * 128;  // q = 128 * high + low, with both in 8 bits
inline constexpr float kWeightSteps = 32767;     // 64 times 127 times this is below 2^31

// A step and its inverse for codes of up to `steps`; 0 if the largest is below 2^-100.
struct Steps {
  float step, inverse;
};
TREADLE_SIMD Steps StepsOf(float largest, float steps) {
  if (largest < 0x1p-100f) return {0.0f, 0.0f};
  return {largest / steps, steps / largest};
}

// The scales of a block's positions.
struct PositionScales {
  float k[kBlock];
  float v[kBlock];       // 0 where nobody of the item sees, and where it is NaN
  uint64_t not_numbers;  // positions of those
};
TREADLE_SIMD void SetScales(const Block<int8_t>& block, int64_t seen, PositionScales& to) {
  to.not_numbers = 0;
  for (int64_t group = 0; group * kLanes < seen; ++group) {
    Store(to.k + group * kLanes, LoadBFloat16(block.k_scales[group]));
    const Vec v = LoadBFloat16(block.v_scales[group]);
    const uint64_t numbers = AtLeastBits(v, Zero());
    const int64_t left = seen - group * kLanes;
    const uint64_t mine = left < kLanes ? (uint64_t{1} << left) - 1 : 0xffff;
    to.not_numbers |= (~numbers & mine) << (group * kLanes);
    // Maxima with 0 of the second operand: NaN is gone.
    Store(to.v + group * kLanes, Select(FirstLanes(left), Max(v, Zero()), Zero()));
  }
}
// Whether a query sees a position whose V is not a number.
TREADLE_SIMD bool SeesNotNumbers(const Tile& tile, int query, const PositionScales& scales) {
  const int64_t from = tile.from[query], limit = tile.limit[query];
  return limit > from && (scales.not_numbers << (kBlock - limit) >> (kBlock - limit) >> from) != 0;
}

// Scores of 16 positions.
TREADLE_SIMD void StoreScores(const Tile& tile, int query, int64_t group, Vec sums,
                              const PositionScales& scales, float q_step) {
  const Vec by_position = Mul(sums, Load(scales.k + group * kLanes));
  Store(tile.weights + query * kBlock + group * kLanes, Mul(by_position, Broadcast(q_step)));
}

// The queries' steps, and body(query, i, codes before they are rounded) for all features.
template <typename Body>
TREADLE_SIMD void QuantizeQueries(const AttentionArguments& a, const Scratch& scratch, Body body) {
  for (int64_t query = 0; query < a.rows * a.group; ++query) {
    const float* const q = scratch.q + query * a.head_dim;
    Vec largest = Zero(), spoiled = Zero();
    ForEachVec(a.head_dim, [&](int64_t i, int64_t lanes) {
      const Vec x = LoadLanes(q + i, lanes);
      largest = Max(largest, Max(x, Sub(Zero(), x)));
      spoiled = Fma(x, Zero(), spoiled);  // 0, or NaN
    });
    const Steps by = StepsOf(MaxLane(largest), kQuerySteps);
    scratch.q_steps[query] = by.step + Sum(spoiled);
    ForEachVec(a.head_dim, [&](int64_t i, int64_t lanes) {
      body(query, i, Mul(LoadLanes(q + i, lanes), Broadcast(by.inverse)));
    });
  }
}

// p times V's scales: their steps, and body(query, codes(group) before they are rounded).
template <typename Body>
TREADLE_SIMD void QuantizeWeights(const Tile& tile, int64_t groups, const PositionScales& scales,
                                  float* steps, Body body) {
  float inverses[kMaxQueries];
  for (int query = 0; query < tile.queries; ++query) {
    float* const p = tile.weights + query * kBlock;
    Vec most = Zero();
    for (int64_t group = 0; group < groups; ++group) {
      const Vec weight = Mul(Load(p + group * kLanes), Load(scales.v + group * kLanes));
      Store(p + group * kLanes, weight);
      most = Max(most, weight);
    }
    const Steps by = StepsOf(MaxLane(most), kWeightSteps);
    inverses[query] = by.inverse;
    steps[query] = by.step;
    if (scales.not_numbers != 0 && SeesNotNumbers(tile, query, scales)) {
      steps[query] = __builtin_nanf("");
    }
  }
  for (int query = 0; query < tile.queries; ++query) {
    const Vec inverse = Broadcast(inverses[query]);
    body(query, [&](int64_t group) {
      return Mul(Load(tile.weights + query * kBlock + group * kLanes), inverse);
    });
  }
}

// A block, and the item's queries and a tile's weights as factors of its codes, in Scratch::tiles.
struct CodeBlock {
  const Block<int8_t>* block;
  PositionScales scales;
  int64_t chain;    // factors of a query: features, padded to a row of AMX's tiles
  uint8_t* q;       // [queries, 2 * chain], queries padded to tiles
  int32_t* q_sums;  // [queries]: of codes
  const float* q_steps;
  uint8_t* p;      // [kMaxQueries, 2 * kBlock]
  uint8_t* spare;  // of AMX
};

CodeBlock CarveCodes(const AttentionArguments& a, const Scratch& scratch) {
  const int64_t queries = Padded(a.rows * a.group);
  CodeBlock s;
  s.chain = PaddedCodes(a.head_dim);
  s.q = reinterpret_cast<uint8_t*>(scratch.tiles);
  s.q_sums = reinterpret_cast<int32_t*>(s.q + 2 * queries * s.chain);
  s.q_steps = scratch.q_steps;
  s.p = reinterpret_cast<uint8_t*>(s.q_sums + queries);
  s.spare = s.p + 2 * kMaxQueries * kBlock;
  return s;
}

#ifdef __AVX512F__

inline constexpr int kCodeQueries = 6;  // at most, together
constexpr int CodeVecs(int queries) { return queries <= 3 ? 4 : 2; }

TREADLE_SIMD __m512i RoundedCodes(Vec x) { return _mm512_cvtps_epi32(x.v); }

// Row of factors: all high digits, then all low ones. kSums: with CodeBlock::q_sums.
template <bool kSums>
void SetQueries(const AttentionArguments& a, const Scratch& scratch, const CodeBlock& s) {
  const auto store = [](uint8_t* to, __m512i bytes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(bytes));
  };
  for (int64_t query = 0; query < a.rows * a.group; ++query) {
    s.q_sums[query] = 0;
    uint8_t* const row = s.q + query * 2 * s.chain;
    for (int64_t i = Padded(a.head_dim); i < s.chain; i += kLanes) {  // K has no such feature
      store(row + i, _mm512_setzero_si512());
      store(row + s.chain + i, _mm512_setzero_si512());
    }
  }
  QuantizeQueries(a, scratch, [&](int64_t query, int64_t i, Vec exact) {
    const __m512i codes = RoundedCodes(exact);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(codes, _mm512_set1_epi32(64)), 7);
    uint8_t* const to = s.q + query * 2 * s.chain + i;
    store(to, high);
    store(to + s.chain, _mm512_sub_epi32(codes, _mm512_slli_epi32(high, 7)));
    if (kSums) s.q_sums[query] += _mm512_reduce_add_epi32(codes);
  });
}

// Where a row of weights has the four positions from 16 * group + 4 * i on: where packing puts
// them.
constexpr int64_t WeightFour(int64_t group, int64_t i) { return 4 * i + group; }

void SetWeights(const Tile& tile, int64_t groups, const CodeBlock& s, float* steps) {
  QuantizeWeights(tile, groups, s.scales, steps, [&](int query, auto exact) {
    const auto codes = [&](int64_t group) {
      return group < groups ? RoundedCodes(exact(group)) : _mm512_setzero_si512();
    };
    const __m512i words[2] = {_mm512_packus_epi32(codes(0), codes(1)),
                              _mm512_packus_epi32(codes(2), codes(3))};
    const __m512i mask = _mm512_set1_epi16(127);
    const __m512i high =
        _mm512_packus_epi16(_mm512_srli_epi16(words[0], 7), _mm512_srli_epi16(words[1], 7));
    const __m512i low =
        _mm512_packus_epi16(_mm512_and_si512(words[0], mask), _mm512_and_si512(words[1], mask));
    _mm512_storeu_si512(s.p + query * 2 * kBlock, high);
    _mm512_storeu_si512(s.p + query * 2 * kBlock + kBlock, low);
  });
}

// Running sums of 16 columns.
struct CodeSums {
  __m512i high, low;
};
TREADLE_SIMD CodeSums NoSums() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
// Four codes of each of 16 columns. kSigned factors want unsigned codes: 128 more.
template <bool kSigned>
TREADLE_SIMD __m512i LoadFours(const int8_t* p) {
  const __m512i fours = _mm512_loadu_si512(p);
  return kSigned ? _mm512_xor_si512(fours, _mm512_set1_epi8(-128)) : fours;
}
// Adds the products with factors 4 * four and the next three of a row, of which there are `count`.
template <bool kSigned, int kVecs>
TREADLE_SIMD void AddFours(CodeSums (&sums)[kVecs], const __m512i (&fours)[kVecs],
                           const uint8_t* row, int64_t count, int64_t four) {
  const auto add = [&](const uint8_t* digits, __m512i CodeSums::*to) {
    const __m512i x = LoadQuad(reinterpret_cast<const int8_t*>(digits + 4 * four)).v;
#pragma GCC unroll 4
    for (int vec = 0; vec < kVecs; ++vec) {
      AddBytes(sums[vec].*to, kSigned ? fours[vec] : x, kSigned ? x : fours[vec]);
    }
  };
  add(row, &CodeSums::high);
  add(row + count, &CodeSums::low);
}
TREADLE_SIMD Vec ToFloat(const CodeSums& sums) {
  return ToFloat(Join(Integers{sums.high}, Integers{sums.low}));
}
// Without what 128 more in each code has added: `factors` is the factors' sum.
TREADLE_SIMD Vec ToFloat(const CodeSums& sums, int32_t factors) {
  const __m512i excess = _mm512_set1_epi32(128 * factors);
  return ToFloat(CodeSums{sums.high, _mm512_sub_epi32(sums.low, excess)});
}

#else

inline constexpr int kCodeQueries = 3;
constexpr int CodeVecs(int) { return 1; }

TREADLE_SIMD __m256i RoundedWords(Vec x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
  return _mm256_permute4x64_epi64(words, 0xd8);
}

template <bool>
void SetQueries(const AttentionArguments& a, const Scratch& scratch, const CodeBlock& s) {
  QuantizeQueries(a, scratch, [&](int64_t query, int64_t i, Vec exact) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(s.q + 2 * (query * s.chain + i)),
                        RoundedWords(exact));
  });
}

constexpr int64_t WeightFour(int64_t group, int64_t i) { return 4 * group + i; }

void SetWeights(const Tile& tile, int64_t groups, const CodeBlock& s, float* steps) {
  QuantizeWeights(tile, groups, s.scales, steps, [&](int query, auto exact) {
    for (int64_t group = 0; group < groups; ++group) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(s.p + 2 * (query * kBlock + group * kLanes)),
                          RoundedWords(exact(group)));
    }
  });
}

// Sums of two of each four: those of a column lie side by side.
struct CodeSums {
  __m256i of[4];
};
TREADLE_SIMD CodeSums NoSums() {
  const __m256i zero = _mm256_setzero_si256();
  return {{zero, zero, zero, zero}};
}
struct Fours {
  __m256i words[4];
};
template <bool kSigned>
TREADLE_SIMD Fours LoadFours(const int8_t* p) {
  Fours fours;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    fours.words[i] =
        _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i)));
  }
  return fours;
}
template <bool kSigned, int kVecs>
TREADLE_SIMD void AddFours(CodeSums (&sums)[kVecs], const Fours (&fours)[kVecs], const uint8_t* row,
                           int64_t, int64_t four) {
  int64_t four_words;
  __builtin_memcpy(&four_words, row + 8 * four, sizeof(four_words));
  const __m256i x = _mm256_set1_epi64x(four_words);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    sums[0].of[i] = AddWordPairs(sums[0].of[i], fours[0].words[i], x);
  }
}
TREADLE_SIMD Vec ToFloat(const CodeSums& sums) {
  const auto join = [](__m256i a, __m256i b) {
    return _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8));
  };
  return {join(sums.of[0], sums.of[1]), join(sums.of[2], sums.of[3])};
}
TREADLE_SIMD Vec ToFloat(const CodeSums& sums, int32_t) { return ToFloat(sums); }

#endif

// Calls body.template operator()<vectors>(first vector) for all of `vectors`.
template <int kQueries, typename Body>
TREADLE_SIMD void ForCodeVecs(int64_t vectors, Body body) {
  constexpr int kVecs = CodeVecs(kQueries);
  int64_t vec = 0;
  for (; vec + kVecs <= vectors; vec += kVecs) body.template operator()<kVecs>(vec);
  for (; vec < vectors; ++vec) body.template operator()<1>(vec);
}

// Queries of the tile from `query` on. The first of an item fetch the next block.
template <int kQueries>
TREADLE_LOOP void ScoreCodes(const Tile& tile, const CodeBlock& s, int query, int64_t groups) {
  const Block<int8_t>& block = *s.block;
  const int64_t first = tile.first + query, stride = block.k_stride;
  const uint8_t* const rows = s.q + first * 2 * s.chain;
  const int8_t* const* next = first > 0 || block.next == nullptr ? nullptr : block.next->k;
  ForCodeVecs<kQueries>(groups, [&]<int kVecs>(int64_t group) {
    CodeSums sums[kQueries][kVecs];
#pragma GCC unroll 32
    for (int i = 0; i < kQueries * kVecs; ++i) sums[i / kVecs][i % kVecs] = NoSums();
    for (int64_t four = 0; 4 * four < tile.head_dim; ++four) {
      decltype(LoadFours<true>(nullptr)) fours[kVecs];
#pragma GCC unroll 4
      for (int vec = 0; vec < kVecs; ++vec) {
        fours[vec] = LoadFours<true>(block.k[group + vec] + four * stride);
        if (next != nullptr) Prefetch<1>(next[group + vec] + four * stride);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kQueries; ++i) {
        AddFours<true>(sums[i], fours, rows + i * 2 * s.chain, s.chain, four);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kQueries; ++i) {
#pragma GCC unroll 4
      for (int vec = 0; vec < kVecs; ++vec) {
        StoreScores(tile, query + i, group + vec, ToFloat(sums[i][vec], s.q_sums[first + i]),
                    s.scales, s.q_steps[first + i]);
      }
    }
  });
}

template <int kQueries>
TREADLE_LOOP void AccumulateCodes(const Tile& tile, const CodeBlock& s, int query, int64_t groups,
                                  const float* steps) {
  const Block<int8_t>& block = *s.block;
  const uint8_t* const rows = s.p + query * 2 * kBlock;
  const bool fetch = tile.first + query == 0 && block.next != nullptr;
  ForCodeVecs<kQueries>(tile.padded_dim / kLanes, [&]<int kVecs>(int64_t feature) {
    CodeSums sums[kQueries][kVecs];
#pragma GCC unroll 32
    for (int i = 0; i < kQueries * kVecs; ++i) sums[i / kVecs][i % kVecs] = NoSums();
    for (int64_t group = 0; group < groups; ++group) {
      const int8_t* const v = block.v[group] + feature * 4 * kLanes;
      const int8_t* const next = fetch ? block.next->v[group] + feature * 4 * kLanes : nullptr;
#pragma GCC unroll 4
      for (int64_t in_group = 0; in_group < kLanes / 4; ++in_group) {
        decltype(LoadFours<false>(nullptr)) fours[kVecs];
#pragma GCC unroll 4
        for (int vec = 0; vec < kVecs; ++vec) {
          const int64_t at = in_group * block.v_stride + vec * 4 * kLanes;
          fours[vec] = LoadFours<false>(v + at);
          if (next != nullptr) Prefetch<1>(next + at);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kQueries; ++i) {
          AddFours<false>(sums[i], fours, rows + i * 2 * kBlock, kBlock,
                          WeightFour(group, in_group));
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kQueries; ++i) {
      const Vec step = Broadcast(steps[query + i]);
#pragma GCC unroll 4
      for (int vec = 0; vec < kVecs; ++vec) {
        Store(tile.vector + (query + i) * tile.padded_dim + (feature + vec) * kLanes,
              Mul(ToFloat(sums[i][vec]), step));
      }
    }
  });
}

// Calls body.template operator()<queries>(first query) for all of the tile's.
template <typename Body>
TREADLE_SIMD void ForCodeQueries(const Tile& tile, Body body) {
  for (int query = 0; query < tile.queries; query += kCodeQueries) {
    const int left = tile.queries - query;
    WithQueries<kCodeQueries>(left < kCodeQueries ? left : kCodeQueries,
                              [&]<int kQueries>() { body.template operator()<kQueries>(query); });
  }
}

// max, sum and vector of one block for the tile's queries.
inline void TileBlock(const Tile& tile, const CodeBlock& s) {
  const int64_t groups = (tile.limit[tile.queries - 1] + kLanes - 1) / kLanes;
  ForCodeQueries(tile,
                 [&]<int kQueries>(int query) { ScoreCodes<kQueries>(tile, s, query, groups); });
  Softmax(tile, groups);
  float steps[kMaxQueries];
  SetWeights(tile, groups, s, steps);
  ForCodeQueries(tile, [&]<int kQueries>(int query) {
    AccumulateCodes<kQueries>(tile, s, query, groups, steps);
  });
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
