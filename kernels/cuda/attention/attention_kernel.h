// The one kernel over a whole ragged batch, by what works on prompts, and what a launch of it
// needs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "kernels/cuda/attention/attention_decode.h"
#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/attention/attention_prompt_rows.h"

namespace treadle::cuda {

TREADLE_DEVICE KvSource SourceOf(const AttentionParams& p, const AttentionTile& tile, int kv_head) {
  KvSource source;
  source.head = p.pages + ((2 * int64_t{kv_head} * p.head_dim) << p.page_shift);
  source.page_bytes = p.page_bytes;
  source.part_bytes = p.part_bytes;
  source.page_ids = p.batch.pages + tile.first_page;
  source.page_shift = p.page_shift;
  source.head_dim = p.head_dim;
  source.begin = FirstSeen(tile.first_position, p.window);
  source.limit = tile.first_position + tile.rows;
  return source;
}

TREADLE_DEVICE TileHeads HeadsOf(const AttentionParams& p, int kv_head, int chunk) {
  const int first = chunk * p.tile_heads;
  const int left = p.group - first;
  return {kv_head * p.group + first, left < p.tile_heads ? left : p.tile_heads};
}

// No sequence has several rows.
struct NoPrompts {
  static constexpr int kThreads = kAttentionThreads;
};

template <typename Prompts>
inline constexpr int kTeams = Prompts::kThreads / kAttentionThreads;

// Grid: tiles, (K/V heads, chunks of their query heads), splits. Prompts: what works on a prompt's
// tile; without, fewer registers and less shared memory are needed. A decoding row's tile is a
// team's: a block with several teams takes as many (K/V heads, chunks), so that what a
// multiprocessor has on its way does not depend on the company.
template <DType kType, int kD, typename Prompts>
TREADLE_KERNEL(Prompts::kThreads)
void AttentionKernel(AttentionParams p) {
  simt::AwaitEarlierLaunches();
  // The last tiles of a prompt see the most, so they go first.
  const int number = simt::GridX() - 1 - simt::BlockX();
  const AttentionTile tile =
      p.one_tile_each ? TileAt(p.batch.sequences[number], number, 0, p.tile_rows)
                      : FindTile(p.batch.sequences, p.batch.num_sequences, p.tile_rows, number);
  if (tile.rows == 0 || (!tile.decoding && simt::BlockZ() > 0)) return;

  constexpr bool kPrompts = !std::is_same_v<Prompts, NoPrompts>;
  const bool by_teams = !kPrompts || tile.decoding;
  const int chunk = by_teams ? simt::BlockY() * kTeams<Prompts> + Team() : simt::BlockY();
  if (chunk >= simt::GridY()) return;
  const int kv_head = chunk / p.head_chunks;
  const TileHeads heads = HeadsOf(p, kv_head, chunk % p.head_chunks);
  const KvSource source = SourceOf(p, tile, kv_head);
  char* const shared = simt::DynamicShared<char>();
  if (by_teams) {
    using Decode = DecodeTile<kType, kD>;
    Decode(p, tile, heads, shared + Team() * Decode::kSharedBytes).Run(source);
    return;
  }
  if constexpr (kPrompts) Prompts(p, tile, heads, shared).Run(source);
}

struct AttentionCode {
  void (*kernel)(AttentionParams) = nullptr;
  int threads = 0;
  size_t shared_bytes = 0;
  int pairs = kMmaRows;  // of a prompt's tile
};
template <DType kType, int kD, typename Prompts>
constexpr AttentionCode MakeAttentionCode() {
  constexpr size_t kDecode = size_t{kTeams<Prompts>} * DecodeTile<kType, kD>::kSharedBytes;
  constexpr size_t kPrompt = Prompts::kSharedBytes;
  return {AttentionKernel<kType, kD, Prompts>, Prompts::kThreads, std::max(kDecode, kPrompt),
          Prompts::kPairs};
}
// Prompts on warpgroups; no kernel for heads of up to 32 or more than 128 features.
// For kF16 and kBF16, each in a file of its own.
template <DType kType>
AttentionCode WarpgroupAttention(int64_t head_dim);

}  // namespace treadle::cuda
