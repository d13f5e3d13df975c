// The register tiles of attention: up to six queries against one block of 64 positions.
//
// Lanes run over positions for the scores (K is stored transposed) and over features for the
// vectors. Every template parameter is a matter of speed alone: an element's order of operations is
// the same in all of them. Only for sources that are compiled once per instruction set; see simd.h.
#pragma once

#include "kernels/cpu/bf16_chains.h"
#include "kernels/cpu/vector_math.h"

namespace treadle::TREADLE_ISA {
namespace {

inline constexpr int64_t kBlock = 64;  // kAttentionBlock
inline constexpr int64_t kGroups = kBlock / kLanes;
inline constexpr int kTile = 6;         // queries in a register tile
inline constexpr int kMaxQueries = 16;  // in a tile of any kind

constexpr int64_t Padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Rows of K, or of V, that lie side by side: codes lie in fours.
template <typename T>
constexpr int64_t kTogether = sizeof(T) == 1 ? 4 : 1;

// Where a block's K and V lie: one pointer per 16 positions (they share a page). Of codes, T is
// int8_t, or float once they are converted, and positions have scales.
template <typename T>
struct Block {
  const T* k[kGroups];  // [head_dim, 16], rows k_stride apart
  const T* v[kGroups];  // [16, head_dim], rows v_stride apart
  int64_t k_stride;     // of kTogether rows
  int64_t v_stride;
  const uint16_t* k_scales[kGroups];  // [16] bfloat16; null: K is no codes
  const uint16_t* v_scales[kGroups];
  // The block after this one, whose memory is fetched into the cache meanwhile. Null: none is.
  const Block* next;
};

// Fetches the lines of 64 bytes in which kVecs vectors from `p` on lie.
template <int kVecs, typename T>
TREADLE_SIMD void Prefetch(const T* p) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < kVecs * kLanes * static_cast<int64_t>(sizeof(T)); i += 64) {
    FetchLater(reinterpret_cast<const char*>(p) + i);
  }
}

// Some queries against one block. Every pointer below is to this tile's part.
struct Tile {
  int queries;
  int64_t first;   // of the item's queries
  const float* q;  // [queries, head_dim], scaled
  // Positions [from, limit) of the block are what each query sees; limit <= 0: none. Neither ever
  // falls from one query to the next.
  int64_t from[kMaxQueries];
  int64_t limit[kMaxQueries];
  // Scores fall by slope times the distance to the query, which is `distance` from the block's
  // first position; if not sloped, they do not.
  bool bf16;  // products are chains of bf16, which q, K and V are already
  bool sloped;
  float slope[kMaxQueries];
  float distance[kMaxQueries];
  int64_t head_dim;
  int64_t padded_dim;
  float* weights;  // [queries, kBlock]: scores, then p
  float* max;      // [queries]
  float* sum;      // [queries]
  float* vector;   // [queries, padded_dim]
};

// scores[query][position] for 16 * kVecs positions.
template <typename T, int kQueries, int kVecs>
TREADLE_SIMD void ScoreVecs(const Tile& tile, const T* const* k, const T* const* next,
                            int64_t stride, float* scores) {
  Vec sums[kQueries][kVecs];
#pragma GCC unroll 8
  for (int query = 0; query < kQueries; ++query) {
#pragma GCC unroll 4
    for (int vec = 0; vec < kVecs; ++vec) sums[query][vec] = Zero();
  }
  const float* queries[kQueries];
#pragma GCC unroll 8
  for (int query = 0; query < kQueries; ++query) queries[query] = tile.q + query * tile.head_dim;
  for (int64_t d = 0; d < tile.head_dim; ++d) {
    Vec keys[kVecs];
#pragma GCC unroll 4
    for (int vec = 0; vec < kVecs; ++vec) {
      keys[vec] = Load(k[vec] + d * stride);
      if (next != nullptr) Prefetch<1>(next[vec] + d * stride);
    }
#pragma GCC unroll 8
    for (int query = 0; query < kQueries; ++query) {
      const Vec value = Broadcast(queries[query][d]);
#pragma GCC unroll 4
      for (int vec = 0; vec < kVecs; ++vec) {
        sums[query][vec] = Fma(value, keys[vec], sums[query][vec]);
      }
    }
  }
#pragma GCC unroll 8
  for (int query = 0; query < kQueries; ++query) {
#pragma GCC unroll 4
    for (int vec = 0; vec < kVecs; ++vec) {
      Store(scores + query * kBlock + vec * kLanes, sums[query][vec]);
    }
  }
}

// vector[query] += sum over positions [from, to) of p V, for 16 * kVecs features. fresh: there is
// nothing in `vector` yet.
template <typename T, int kQueries, int kVecs>
TREADLE_SIMD void AccumulateVecs(const Block<T>& block, const float* p, int64_t from, int64_t to,
                                 bool fresh, int64_t feature, int64_t padded_dim, float* vector) {
  Vec sums[kQueries][kVecs];
#pragma GCC unroll 8
  for (int query = 0; query < kQueries; ++query) {
#pragma GCC unroll 4
    for (int vec = 0; vec < kVecs; ++vec) {
      sums[query][vec] =
          fresh ? Zero() : Load(vector + query * padded_dim + feature + vec * kLanes);
    }
  }
  while (from < to) {
    const int64_t group = from / kLanes;
    const int64_t end = (group + 1) * kLanes < to ? (group + 1) * kLanes : to;
    const T* v = block.v[group] + (from % kLanes) * block.v_stride + feature;
    const T* next = block.next == nullptr
                        ? nullptr
                        : block.next->v[group] + (from % kLanes) * block.v_stride + feature;
    for (; from < end; ++from, v += block.v_stride) {
      if (next != nullptr) {
        Prefetch<kVecs>(next);
        next += block.v_stride;
      }
      Vec values[kVecs];
#pragma GCC unroll 4
      for (int vec = 0; vec < kVecs; ++vec) values[vec] = Load(v + vec * kLanes);
#pragma GCC unroll 8
      for (int query = 0; query < kQueries; ++query) {
        const Vec weight = Broadcast(p[query * kBlock + from]);
#pragma GCC unroll 4
        for (int vec = 0; vec < kVecs; ++vec) {
          sums[query][vec] = Fma(weight, values[vec], sums[query][vec]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int query = 0; query < kQueries; ++query) {
#pragma GCC unroll 4
    for (int vec = 0; vec < kVecs; ++vec) {
      Store(vector + query * padded_dim + feature + vec * kLanes, sums[query][vec]);
    }
  }
}

// Vectors per query that fill, and do not overflow, the registers beside the operands.
constexpr int TileVecs(int queries) { return kWideRegisters ? 4 : queries <= 3 ? 2 : 1; }

template <typename T, int kQueries>
void ScoreTile(const Tile& tile, const Block<T>& block, int64_t groups) {
  constexpr int kVecs = TileVecs(kQueries);
  const T* const* next = block.next == nullptr ? nullptr : block.next->k;
  int64_t group = 0;
  for (; group + kVecs <= groups; group += kVecs) {
    ScoreVecs<T, kQueries, kVecs>(tile, block.k + group, next == nullptr ? nullptr : next + group,
                                  block.k_stride, tile.weights + group * kLanes);
  }
  for (; group < groups; ++group) {
    ScoreVecs<T, kQueries, 1>(tile, block.k + group, nullptr, block.k_stride,
                              tile.weights + group * kLanes);
  }
}

// `query`: the first of kQueries of the tile.
template <typename T, int kQueries>
void AccumulateTile(const Tile& tile, const Block<T>& block, int query, int64_t from, int64_t to,
                    bool fresh) {
  constexpr int kVecs = TileVecs(kQueries);
  const float* p = tile.weights + query * kBlock;
  float* vector = tile.vector + query * tile.padded_dim;
  int64_t feature = 0;
  for (; feature + kVecs * kLanes <= tile.padded_dim; feature += kVecs * kLanes) {
    AccumulateVecs<T, kQueries, kVecs>(block, p, from, to, fresh, feature, tile.padded_dim, vector);
  }
  for (; feature < tile.padded_dim; feature += kLanes) {
    AccumulateVecs<T, kQueries, 1>(block, p, from, to, fresh, feature, tile.padded_dim, vector);
  }
}

// The code for as many queries as the tile has.
template <typename T, int kQueries = kTile>
void Scores(const Tile& tile, const Block<T>& block, int64_t groups) {
  if constexpr (kQueries > 1) {
    if (tile.queries < kQueries) return Scores<T, kQueries - 1>(tile, block, groups);
  }
  ScoreTile<T, kQueries>(tile, block, groups);
}

template <typename T, int kQueries = kTile>
void AccumulateAll(const Tile& tile, const Block<T>& block, int64_t from, int64_t to, bool fresh) {
  if constexpr (kQueries > 1) {
    if (tile.queries < kQueries) {
      return AccumulateAll<T, kQueries - 1>(tile, block, from, to, fresh);
    }
  }
  AccumulateTile<T, kQueries>(tile, block, 0, from, to, fresh);
}

// Multiplies each query's number of each position, a score or p, by the position's scale.
inline void ScalePositions(const Tile& tile, int64_t groups, const uint16_t* const* scales) {
  for (int64_t group = 0; group < groups; ++group) {
    const Vec scale = LoadBFloat16(scales[group]);
    for (int query = 0; query < tile.queries; ++query) {
      float* at = tile.weights + query * kBlock + group * kLanes;
      Store(at, Mul(Load(at), scale));
    }
  }
}

// Scores of one query fall with the distance (KvView::slopes).
void Slope(const Tile& tile, int query, int64_t groups) {
  float lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<float>(lane);
  float* scores = tile.weights + query * kBlock;
  const Vec slope = Broadcast(tile.slope[query]);
  for (int64_t group = 0; group < groups; ++group, scores += kLanes) {
    const float ahead = static_cast<float>(group * kLanes) - tile.distance[query];
    Store(scores, Fma(slope, Add(Load(lanes), Broadcast(ahead)), Load(scores)));
  }
}

// Scores to p, max and sum, in three loops: each is a row of independent short chains, where one
// loop over queries would wait for the latency of all of them in turn. What lies after a query's
// own position, or before its window, is blended out, as it may be NaN; its p is exactly 0.
void Softmax(const Tile& tile, int64_t groups) {
  int first = 0;
  while (tile.limit[first] <= 0) ++first;
  for (int query = first; query < tile.queries; ++query) {
    float* scores = tile.weights + query * kBlock;
    const int64_t limit = tile.limit[query];
    if (tile.sloped) Slope(tile, query, groups);
    for (int64_t group = limit / kLanes; group < groups; ++group) {
      const Mask seen = FirstLanes(limit - group * kLanes);
      Store(scores + group * kLanes,
            Select(seen, Load(scores + group * kLanes), Broadcast(-kInfinity)));
    }
    for (int64_t group = 0; group * kLanes < tile.from[query]; ++group) {
      const Mask unseen = FirstLanes(tile.from[query] - group * kLanes);
      Store(scores + group * kLanes,
            Select(unseen, Broadcast(-kInfinity), Load(scores + group * kLanes)));
    }
    Vec largest = Load(scores);
    for (int64_t group = 1; group < groups; ++group) {
      largest = Max(largest, Load(scores + group * kLanes));
    }
    tile.max[query] = MaxLane(largest);
  }
  for (int query = first; query < tile.queries; ++query) {
    float* scores = tile.weights + query * kBlock;
    const Vec max = Broadcast(tile.max[query]);
    for (int64_t group = 0; group < groups; ++group) {
      Store(scores + group * kLanes, Exp(Sub(Load(scores + group * kLanes), max)));
    }
  }
  for (int query = first; query < tile.queries; ++query) {
    const float* p = tile.weights + query * kBlock;
    Vec sum = Load(p);
    for (int64_t group = 1; group < groups; ++group) sum = Add(sum, Load(p + group * kLanes));
    tile.sum[query] = Sum(sum);
  }
}

// Calls body.template operator()<queries>().
template <int kQueries = kTile, typename Body>
TREADLE_SIMD void WithQueries(int queries, Body body) {
  if constexpr (kQueries > 1) {
    if (queries < kQueries) return WithQueries<kQueries - 1>(queries, body);
  }
  body.template operator()<kQueries>();
}

// out[query][lane] of 16 * kVecs lanes: the sum over terms [from, to) of factors[query][term] times
// values(term, vec), by chains. A term that is left out is one that is 0.
template <int kQueries, int kVecs, typename Values>
TREADLE_SIMD void ChainVecs(const float* factors, int64_t factor_stride, int64_t from, int64_t to,
                            float* out, int64_t out_stride, Values values) {
  Vec sums[kQueries][kVecs];
#pragma GCC unroll 32
  for (int i = 0; i < kQueries * kVecs; ++i) sums[i / kVecs][i % kVecs] = Zero();
  for (int64_t begin = from / kChainTerms * kChainTerms; begin < to; begin += kChainTerms) {
    const int64_t end = begin + kChainTerms < to ? begin + kChainTerms : to;
    Vec even[kQueries][kVecs], odd[kQueries][kVecs];
#pragma GCC unroll 32
    for (int i = 0; i < kQueries * kVecs; ++i) {
      even[i / kVecs][i % kVecs] = odd[i / kVecs][i % kVecs] = Zero();
    }
    const auto add = [&](int64_t term, Vec(&to_chain)[kQueries][kVecs]) {
      Vec x[kVecs];
#pragma GCC unroll 4
      for (int vec = 0; vec < kVecs; ++vec) x[vec] = values(term, vec);
#pragma GCC unroll 8
      for (int query = 0; query < kQueries; ++query) {
        const Vec factor = Broadcast(factors[query * factor_stride + term]);
#pragma GCC unroll 4
        for (int vec = 0; vec < kVecs; ++vec) {
          to_chain[query][vec] = Fma(factor, x[vec], to_chain[query][vec]);
        }
      }
    };
    if (begin >= from && end - begin == kChainTerms) {
      for (int64_t term = begin; term < begin + kChainTerms; term += 2) {
        add(term, even);
        add(term + 1, odd);
      }
    } else {
      for (int64_t term = begin < from ? from : begin; term < end; ++term) {
        add(term, term % 2 == 0 ? even : odd);
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < kQueries * kVecs; ++i) {
      Vec& sum = sums[i / kVecs][i % kVecs];
      sum = Add(sum, Add(even[i / kVecs][i % kVecs], odd[i / kVecs][i % kVecs]));
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kQueries * kVecs; ++i) {
    Store(out + i / kVecs * out_stride + i % kVecs * kLanes, sums[i / kVecs][i % kVecs]);
  }
}

// Calls body.template operator()<vectors>(first vector) for all of `vectors`.
template <int kQueries, typename Body>
TREADLE_SIMD void ForChainVecs(int64_t vectors, Body body) {
  constexpr int kVecs = !kWideRegisters ? 1 : kQueries <= 3 ? 4 : 2;
  int64_t vec = 0;
  for (; vec + kVecs <= vectors; vec += kVecs) body.template operator()<kVecs>(vec);
  for (; vec < vectors; ++vec) body.template operator()<1>(vec);
}

template <typename T>
void ChainScores(const Tile& tile, const Block<T>& block, int64_t groups) {
  const ScopedFlush flush;
  WithQueries(tile.queries, [&]<int kQueries>() {
    ForChainVecs<kQueries>(groups, [&]<int kVecs>(int64_t group) {
      ChainVecs<kQueries, kVecs>(tile.q, tile.head_dim, 0, tile.head_dim,
                                 tile.weights + group * kLanes, kBlock, [&](int64_t d, int vec) {
                                   if (block.next != nullptr)
                                     Prefetch<1>(block.next->k[group + vec] + d * block.k_stride);
                                   return Load(block.k[group + vec] + d * block.k_stride);
                                 });
    });
  });
}

// Queries together if they see the same, else each by itself.
template <typename T>
void ChainAccumulate(const Tile& tile, const Block<T>& block) {
  const ScopedFlush flush;
  for (int query = 0; query < tile.queries; ++query) {
    RoundToBf16(tile.weights + query * kBlock, kBlock, tile.weights + query * kBlock);
  }
  const auto accumulate = [&]<int kQueries>(int query) {
    const int64_t from = tile.from[query], to = tile.limit[query];
    ForChainVecs<kQueries>(tile.padded_dim / kLanes, [&]<int kVecs>(int64_t feature) {
      ChainVecs<kQueries, kVecs>(tile.weights + query * kBlock, kBlock, from, to,
                                 tile.vector + query * tile.padded_dim + feature * kLanes,
                                 tile.padded_dim, [&](int64_t position, int vec) {
                                   const int64_t group = position / kLanes;
                                   const int64_t at = position % kLanes * block.v_stride +
                                                      (feature + vec) * kLanes;
                                   if (block.next != nullptr)
                                     Prefetch<1>(block.next->v[group] + at);
                                   return Load(block.v[group] + at);
                                 });
    });
  };
  const int last = tile.queries - 1;
  if (tile.from[0] == tile.from[last] && tile.limit[0] == tile.limit[last]) {
    return WithQueries(tile.queries,
                       [&]<int kQueries>() { accumulate.template operator()<kQueries>(0); });
  }
  for (int query = 0; query <= last; ++query) accumulate.template operator()<1>(query);
}

// max, sum and vector of one block for the tile's queries.
template <typename T>
void TileBlock(const Tile& tile, const Block<T>& block) {
  const int64_t seen = tile.limit[tile.queries - 1];  // later rows see more
  const int64_t groups = (seen + kLanes - 1) / kLanes;
  const bool codes = block.k_scales[0] != nullptr;
  if (tile.bf16) {
    ChainScores(tile, block, groups);
  } else {
    Scores(tile, block, groups);
  }
  if (codes) ScalePositions(tile, groups, block.k_scales);
  Softmax(tile, groups);
  if (codes) ScalePositions(tile, groups, block.v_scales);
  if (tile.bf16) return ChainAccumulate(tile, block);
  // Every query by itself, but for what all of them see.
  const int64_t begin = tile.from[tile.queries - 1];
  const int64_t end = tile.limit[0];
  const bool shared = begin < end;
  if (shared) {
    const bool fresh = tile.from[0] == begin;
    for (int query = 0; !fresh && query < tile.queries; ++query) {
      AccumulateTile<T, 1>(tile, block, query, tile.from[query], begin, /*fresh=*/true);
    }
    AccumulateAll(tile, block, begin, end, fresh);
  }
  for (int query = 0; query < tile.queries; ++query) {
    const int64_t from = shared ? end : tile.from[query];
    if (tile.limit[query] <= from) continue;
    AccumulateTile<T, 1>(tile, block, query, from, tile.limit[query], /*fresh=*/!shared);
  }
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
