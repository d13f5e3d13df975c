// One item of attention: its memory, its blocks of K/V, and how their results are combined.
//
// Only for sources that are compiled once per instruction set; see simd.h.
#pragma once

#include "kernels/cpu/ops/attention_kernels.h"
#include "kernels/cpu/ops/attention_tile.h"

namespace treadle::TREADLE_ISA {
namespace {

// Running results of the queries of an item.
struct Running {
  float* max;     // [queries]
  float* sum;     // [queries]
  float* vector;  // [queries, padded_dim]
};

// Takes one block's results of `queries` consecutive queries into the running ones.
void Combine(const Running& to, const float* max, const float* sum, const float* vector,
             const int64_t* limit, int queries, int64_t padded_dim) {
  float old_factor[kLanes];
  float new_factor[kLanes];
  const Vec old_max = LoadFirst(to.max, queries);
  const Vec block_max = LoadFirst(max, queries);
  const Vec new_max = Max(old_max, block_max);
  Store(old_factor, Exp(Sub(old_max, new_max)));
  Store(new_factor, Exp(Sub(block_max, new_max)));
  float maxima[kLanes];
  Store(maxima, new_max);
  for (int query = 0; query < queries; ++query) {
    if (limit[query] <= 0) continue;
    const Vec before = Broadcast(old_factor[query]);
    const Vec after = Broadcast(new_factor[query]);
    to.max[query] = maxima[query];
    to.sum[query] =
        __builtin_fmaf(sum[query], new_factor[query], to.sum[query] * old_factor[query]);
    for (int64_t i = 0; i < padded_dim; i += kLanes) {
      float* o = to.vector + query * padded_dim + i;
      Store(o, Fma(Load(vector + query * padded_dim + i), after, Mul(Load(o), before)));
    }
  }
}

// Nothing but the sinks, which come before all blocks.
void Clear(const AttentionArguments& a, const Running& running) {
  const int64_t queries = a.rows * a.group, padded_dim = Padded(a.value_dim);
  for (int64_t query = 0; query < queries; ++query) {
    running.max[query] = a.sinks == nullptr ? -kInfinity : a.sinks[query % a.group];
    running.sum[query] = a.sinks == nullptr ? 0.0f : 1.0f;
  }
  for (int64_t i = 0; i < queries * padded_dim; i += kLanes) Store(running.vector + i, Zero());
}

// Normalizes and writes the rows.
void Finish(const AttentionArguments& a, const Running& running) {
  const int64_t padded_dim = Padded(a.value_dim);
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t head = 0; head < a.group; ++head) {
      const int64_t query = row * a.group + head;
      const Vec sum = Broadcast(running.sum[query]);
      const float* vector = running.vector + query * padded_dim;
      float* out = a.out + row * a.out_stride + head * a.value_dim;
      ForEachVec(a.value_dim, [&](int64_t i, int64_t lanes) {
        StoreLanes(out + i, Div(Load(vector + i), sum), lanes);
      });
    }
  }
}

// One thread's memory, in the order in which it is carved from AttentionArguments::scratch.
struct Scratch {
  float* k;        // [head_dim, kBlock]
  float* v;        // [kBlock, padded_dim]
  float* q;        // [queries, head_dim], scaled
  float* weights;  // [kMaxQueries, kBlock]
  float* q_steps;  // [queries], of codes
  Running tile;    // one block's results of one tile
  Running running;
  float* tiles;  // TileFloats, for attention_codes.h and AMX
};

constexpr int64_t kRowCodes = 64;  // bytes in a row of AMX's tiles
constexpr int64_t PaddedCodes(int64_t n) { return (n + kRowCodes - 1) / kRowCodes * kRowCodes; }
// Room for K, V, rows of q and softmax weights as bf16, or as codes of two digits with their sums.
constexpr int64_t TileFloats(int64_t queries, int64_t head_dim) {
  const int64_t chain = PaddedCodes(head_dim);
  const int64_t pairs = kBlock * (chain + Padded(head_dim)) + Padded(queries) * (chain + 2) +
                        5 * kMaxQueries * kBlock;
  return pairs / 2;
}

Scratch Carve(float* next, int64_t queries, int64_t head_dim) {
  const int64_t padded_dim = Padded(head_dim);
  const auto take = [&next](int64_t floats) {
    float* begin = next;
    next += Padded(floats);
    return begin;
  };
  Scratch s;
  s.k = take(head_dim * kBlock);
  s.v = take(padded_dim * kBlock);
  s.q = take(queries * head_dim);
  s.weights = take(kMaxQueries * kBlock);
  s.q_steps = take(queries);
  s.tile = {take(kLanes), take(kLanes), take(kMaxQueries * padded_dim)};
  s.running = {take(queries), take(queries), take(queries * padded_dim)};
  s.tiles = take(TileFloats(queries, head_dim));
  return s;
}

void ScaleQueries(const AttentionArguments& a, float* to) {
  const Vec scale = Broadcast(a.scale);
  for (int64_t row = 0; row < a.rows; ++row, to += a.group * a.head_dim) {
    const float* q = a.q + row * a.q_stride;
    ForEachVec(a.group * a.head_dim, [&](int64_t i, int64_t lanes) {
      StoreLanes(to + i, Mul(LoadLanes(q + i, lanes), scale), lanes);
    });
    if (a.bf16) RoundToBf16(to, a.group * a.head_dim, to);
  }
}

// Sets the block as it lies in its pages.
template <typename T>
void SetPaged(const AttentionArguments& a, int64_t first_position, int64_t groups,
              Block<T>& block) {
  block.next = nullptr;
  const int64_t stored_dim = (a.value_dim + kTogether<T> - 1) / kTogether<T> * kTogether<T>;
  block.k_stride = kTogether<T> * a.page_size;
  block.v_stride = kTogether<T> * stored_dim;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t position = first_position + group * kLanes;
    const int64_t page = int64_t{a.pages[position / a.page_size]} * a.page_bytes;
    const int64_t slot = position % a.page_size;
    block.k[group] = reinterpret_cast<const T*>(a.k + page) + kTogether<T> * slot;
    if (a.v != nullptr) {
      block.v[group] = reinterpret_cast<const T*>(a.v + page) + slot * stored_dim;
    }
    block.k_scales[group] = block.v_scales[group] = nullptr;
    if (a.dtype != DType::kI8) continue;
    block.k_scales[group] = reinterpret_cast<const uint16_t*>(a.k_scales + page) + slot;
    block.v_scales[group] = reinterpret_cast<const uint16_t*>(a.v_scales + page) + slot;
  }
}

// V of a block as float: the last rows of K, [value_dim, kBlock], for `groups` of positions.
void TransposeValues(const AttentionArguments& a, int64_t groups, const Scratch& scratch) {
  const int64_t padded_dim = Padded(a.value_dim);
  const float* const k = scratch.k + (a.head_dim - a.value_dim) * kBlock;
  int64_t i = 0;
  for (; i + kLanes <= a.value_dim; i += kLanes) {
    for (int64_t at = 0; at < groups * kLanes; at += kLanes) {
      Transpose(k + i * kBlock + at, kBlock, scratch.v + at * padded_dim + i, padded_dim);
    }
  }
  for (; i < padded_dim; ++i) {
    for (int64_t at = 0; at < groups * kLanes; ++at) {
      scratch.v[at * padded_dim + i] = i < a.value_dim ? k[i * kBlock + at] : 0.0f;
    }
  }
}

// The same as float in scratch, features padded to whole vectors. Reads past a row of codes stay
// within the page, whose scales follow.
template <typename T>
Block<float> Convert(const Block<T>& from, const AttentionArguments& a, const Scratch& scratch,
                     int64_t seen) {
  const auto load = [](const T* p, [[maybe_unused]] int64_t row, [[maybe_unused]] int64_t lanes) {
    if constexpr (kTogether<T> == 4) return LoadOfFours(p, static_cast<int>(row % 4));
    if constexpr (kTogether<T> == 1) return LoadLanes(p, lanes);
  };
  const int64_t padded_dim = Padded(a.value_dim);
  const int64_t groups = (seen + kLanes - 1) / kLanes;
  for (int64_t d = 0; d < a.head_dim; ++d) {
    const int64_t row = d / kTogether<T> * from.k_stride;
    for (int64_t group = 0; group < groups; ++group) {
      Store(scratch.k + d * kBlock + group * kLanes, load(from.k[group] + row, d, kLanes));
      if (from.next != nullptr) Prefetch<1>(from.next->k[group] + row);
    }
  }
  if (a.v == nullptr) TransposeValues(a, groups, scratch);
  for (int64_t position = 0; a.v != nullptr && position < seen; ++position) {
    const int64_t group = position / kLanes;
    const int64_t row = position % kLanes / kTogether<T> * from.v_stride;
    const T* v = from.v[group] + row;
    ForEachVec(a.value_dim, [&](int64_t i, int64_t lanes) {
      Store(scratch.v + position * padded_dim + i, load(v + kTogether<T> * i, position, lanes));
      if (from.next != nullptr) Prefetch<1>(from.next->v[group] + row + kTogether<T> * i);
    });
  }
  Block<float> block = {};
  block.k_stride = kBlock;
  block.v_stride = padded_dim;
  for (int64_t group = 0; group < kGroups; ++group) {
    block.k[group] = scratch.k + group * kLanes;
    block.v[group] = scratch.v + group * kLanes * padded_dim;
    block.k_scales[group] = from.k_scales[group];
    block.v_scales[group] = from.v_scales[group];
  }
  return block;
}

// The queries from the item's `first` on that can share a tile of `most`, and what each sees of the
// block: those that see something, and those before them. Returns whether there are any.
bool SetSeen(const AttentionArguments& a, int64_t first, int64_t index, int most, Tile& tile) {
  const int64_t left = a.rows * a.group - first;
  int64_t row = first / a.group, head = first % a.group;
  int seeing = 0;
  for (int query = 0; query < most && query < left; ++query) {
    const int64_t limit = a.first_position + row + 1 - index * kBlock;
    const int64_t from = a.window > 0 && limit > a.window ? limit - a.window : 0;
    tile.limit[query] = limit < kBlock ? limit : kBlock;
    tile.from[query] = from;
    if (a.slopes != nullptr) {
      tile.distance[query] = static_cast<float>(limit - 1);
      tile.slope[query] = a.slopes[head];
    }
    if (from < kBlock) seeing = query + 1;
    if (++head == a.group) ++row, head = 0;
  }
  tile.queries = seeing;
  return seeing > 0 && tile.limit[seeing - 1] > 0;
}

// A block's partial results: max [queries], sum [queries], vector [queries, padded_dim].
float* PartialOf(const AttentionArguments& a, int64_t index) {
  return a.partials + (index - a.block_begin) * a.rows * a.group * (2 + Padded(a.value_dim));
}

// All tiles of the item against one block, which is a Block or a CodeBlock (attention_codes.h).
template <typename AnyBlock>
void ItemBlock(const AttentionArguments& a, const Scratch& scratch, const AnyBlock& block,
               int64_t index) {
  const int64_t queries = a.rows * a.group;
  const int64_t padded_dim = Padded(a.value_dim);
  float* partial = a.partials == nullptr ? nullptr : PartialOf(a, index);
  for (int64_t first = 0; first < queries; first += kTile) {
    Tile tile;
    if (!SetSeen(a, first, index, kTile, tile)) continue;
    tile.sloped = a.slopes != nullptr;
    tile.bf16 = a.bf16;
    tile.first = first;
    tile.q = scratch.q + first * a.head_dim;
    tile.head_dim = a.head_dim;
    tile.padded_dim = padded_dim;
    tile.weights = scratch.weights;
    tile.max = partial == nullptr ? scratch.tile.max : partial + first;
    tile.sum = partial == nullptr ? scratch.tile.sum : partial + queries + first;
    tile.vector =
        partial == nullptr ? scratch.tile.vector : partial + 2 * queries + first * padded_dim;
    TileBlock(tile, block);
    if (partial == nullptr) {
      const Running to = {scratch.running.max + first, scratch.running.sum + first,
                          scratch.running.vector + first * padded_dim};
      Combine(to, tile.max, tile.sum, tile.vector, tile.limit, tile.queries, padded_dim);
    }
  }
}

// The same by sixteen queries: products(tile) sets max, sum and vector of whole tiles of AMX.
template <typename Products>
void ItemOnTiles(const AttentionArguments& a, const Scratch& scratch, int64_t index,
                 Products products) {
  const int64_t queries = a.rows * a.group;
  const int64_t padded_dim = Padded(a.value_dim);
  float* partial = a.partials == nullptr ? nullptr : PartialOf(a, index);
  for (int64_t first = 0; first < queries; first += kMaxQueries) {
    Tile tile;
    if (!SetSeen(a, first, index, kMaxQueries, tile)) continue;
    tile.first = first;
    tile.sloped = a.slopes != nullptr;
    tile.head_dim = a.head_dim;
    tile.padded_dim = padded_dim;
    tile.weights = scratch.weights;
    tile.max = scratch.tile.max;
    tile.sum = scratch.tile.sum;
    tile.vector = scratch.tile.vector;
    products(tile);
    if (partial == nullptr) {
      const Running to = {scratch.running.max + first, scratch.running.sum + first,
                          scratch.running.vector + first * padded_dim};
      Combine(to, tile.max, tile.sum, tile.vector, tile.limit, tile.queries, padded_dim);
    } else {
      const auto copy = [&](float* to, const float* from, int64_t floats) {
        __builtin_memcpy(to, from, static_cast<size_t>(floats) * sizeof(float));
      };
      copy(partial + first, tile.max, tile.queries);
      copy(partial + queries + first, tile.sum, tile.queries);
      copy(partial + 2 * queries + first * padded_dim, tile.vector, tile.queries * padded_dim);
    }
  }
}

// Calls body(block, its index, positions of it that the item sees) for the item's range of blocks.
template <typename T, typename Body>
void ForEachBlock(const AttentionArguments& a, Body body) {
  int64_t seen[2];
  Block<T> blocks[2];  // by turns
  const auto take = [&](int64_t index) {
    const int64_t end = a.first_position + a.rows - index * kBlock;
    const int64_t sees = end < kBlock ? end : kBlock;
    seen[index % 2] = sees;
    SetPaged(a, index * kBlock, (sees + kLanes - 1) / kLanes, blocks[index % 2]);
  };
  take(a.block_begin);
  for (int64_t index = a.block_begin; index < a.block_end; ++index) {
    Block<T>& block = blocks[index % 2];
    if (index + 1 < a.block_end) {
      take(index + 1);
      // Whole blocks only: all their places have an address.
      if (seen[(index + 1) % 2] == kBlock) block.next = &blocks[(index + 1) % 2];
    }
    body(block, index, seen[index % 2]);
  }
}

// Calls body.template operator()<T>() with the type of the cache's elements.
template <typename Body>
void WithCacheType(DType dtype, Body body) {
  if (dtype == DType::kI8) return body.template operator()<int8_t>();
  if (dtype == DType::kF16) return body.template operator()<uint16_t>();
  body.template operator()<float>();
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
