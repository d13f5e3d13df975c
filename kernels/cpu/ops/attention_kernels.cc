// Causal grouped-query attention over paged K/V, one block of 64 absolute positions at a time.
//
// Per block and query: scores (a sum over head_dim, ascending; of codes, times K's scale), their
// maximum m, p = exp(score - m), s = sum of p (16 partial sums), o = sum of p V (over positions,
// ascending; of codes, p times V's scale is what multiplies them). Blocks are combined in ascending
// order by one formula (Milakov and Gimelshein 2018, as FlashAttention applies it per block): M' =
// max(M, m), S' = S e^(M - M') + s e^(m - M'), O' likewise. How many queries share a tile, and
// whether K/V was converted first, changes no element's order of operations. The register tiles are
// in attention_tile.h.
//
// Where K/V has eight bits, codes are multiplied by codes instead (attention_codes.h). With
// ComputeMode::kBf16 both sums are chains (bf16_chains.h) of bf16 numbers: q and p (of codes,
// times V's scale) are rounded, K and V were when they were stored, and codes are as they are.
#include "kernels/cpu/ops/attention_kernels.h"

#include "kernels/cpu/ops/attention_codes.h"
#include "kernels/cpu/ops/attention_item.h"

namespace treadle::TREADLE_ISA {
namespace {

// From this many queries on, a block of fp16 is converted to float once instead of per tile. One of
// codes always is.
constexpr int64_t kConvertQueries = 5;

}  // namespace

void AttendBlocks(const AttentionArguments& a) {
  const Scratch scratch = Carve(a.scratch, a.rows * a.group, a.head_dim);
  ScaleQueries(a, scratch.q);
  if (a.partials == nullptr) Clear(a, scratch.running);
  if (a.codes) {
    CodeBlock codes = CarveCodes(a, scratch);
    SetQueries</*kSums=*/true>(a, scratch, codes);
    ForEachBlock<int8_t>(a, [&](const Block<int8_t>& block, int64_t index, int64_t seen) {
      codes.block = &block;
      SetScales(block, seen, codes.scales);
      ItemBlock(a, scratch, codes, index);
    });
    if (a.partials == nullptr) Finish(a, scratch.running);
    return;
  }
  WithCacheType(a.dtype, [&]<typename T>() {
    const bool convert = a.head_dim % kLanes != 0 || a.v == nullptr ||
                         (sizeof(T) != sizeof(float) && a.rows * a.group >= kConvertQueries);
    ForEachBlock<T>(a, [&](const Block<T>& block, int64_t index, int64_t seen) {
      if constexpr (sizeof(T) > 1) {
        if (!convert) return ItemBlock(a, scratch, block, index);
      }
      ItemBlock(a, scratch, Convert(block, a, scratch, seen), index);
    });
  });
  if (a.partials == nullptr) Finish(a, scratch.running);
}

int64_t AttentionScratchFloats(int64_t queries, int64_t head_dim) {
  const int64_t padded_dim = Padded(head_dim);
  const int64_t shared = Padded(head_dim * kBlock) + padded_dim * kBlock + kMaxQueries * kBlock;
  const int64_t tile = 2 * kLanes + kMaxQueries * padded_dim;
  const int64_t item = Padded(queries * head_dim) + 3 * Padded(queries) + queries * padded_dim;
  return shared + tile + item + Padded(TileFloats(queries, head_dim));
}

int64_t AttentionPartialFloats(int64_t queries, int64_t value_dim) {
  return queries * (2 + Padded(value_dim));
}

void CombineAttention(const AttentionArguments& a) {
  const int64_t queries = a.rows * a.group;
  const int64_t padded_dim = Padded(a.value_dim);
  const Running running = Carve(a.scratch, queries, a.head_dim).running;
  Clear(a, running);
  for (int64_t index = a.block_begin; index < a.block_end; ++index) {
    const float* partial = PartialOf(a, index);
    for (int64_t first = 0; first < queries; first += kTile) {
      Tile tile;
      if (!SetSeen(a, first, index, kTile, tile)) continue;
      const Running to = {running.max + first, running.sum + first,
                          running.vector + first * padded_dim};
      Combine(to, partial + first, partial + queries + first,
              partial + 2 * queries + first * padded_dim, tile.limit, tile.queries, padded_dim);
    }
  }
  Finish(a, running);
}

}  // namespace treadle::TREADLE_ISA
