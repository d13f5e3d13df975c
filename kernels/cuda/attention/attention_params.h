// The arguments of the kernels of attention.cu and attention_general.cu.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention/attention_map.h"
#include "kernels/cuda/rows/row_output.h"
#include "kernels/cuda/runtime/batch.h"
#include "kernels/cuda/runtime/device.h"

namespace treadle::cuda {

inline constexpr float kLog2E = 1.44269504f;  // weights are powers of 2

struct AttentionParams {
  const float* q;  // [rows, heads * head_dim], rows q_stride apart
  RowOutput out;   // as q
  int64_t q_stride;
  const char* pages;   // of one layer
  int64_t page_bytes;  // from page to page
  int64_t part_bytes;  // of its K
  int32_t page_shift;  // page_size = 1 << page_shift
  int32_t head_dim;
  int32_t heads;        // query heads
  int32_t group;        // query heads per K/V head
  int32_t tile_heads;   // of one K/V head in one tile: min(group, kMmaRows)
  int32_t head_chunks;  // ceil(group / tile_heads)
  int32_t tile_rows;    // of a prompt's tile
  bool one_tile_each;   // no sequence has more than tile_rows rows: tile s is sequence s
  float scale;          // of scores, times log2(e)
  int32_t window;       // KvView::window; the largest number: none
  const float* slopes;  // KvView::slopes; of general kernels
  const float* sinks;   // KvView::sinks; likewise
  // Splits of a decoding row run side by side if its sequence's number is below split_sequences;
  // they leave their parts in scratch. 0: no row's do.
  int32_t split_sequences;
  int32_t splits;       // upper bound of a row's splits: the grid's depth
  float* part_stats;    // [split_sequences, heads, splits, 2]: max, sum
  float* part_vectors;  // [split_sequences, heads, splits, head_dim]
  DeviceBatch batch;
};

// Where a part lies, counted in parts.
TREADLE_HOST_DEVICE int64_t PartIndex(const AttentionParams& p, int32_t sequence, int32_t head,
                                      int32_t split) {
  return (int64_t{sequence} * p.heads + head) * p.splits + split;
}

// Attention that the tensor-core kernels do not take: K/V of f32, head sizes that are no multiple
// of 8 or above 256 (128 where shared memory is short, attention.cu), slopes, and sinks. One warp
// for each (row, query head), plain f32 arithmetic, the same blocks; right, not fast.
void LaunchGeneralAttention(Device& device, DType kv_type, const AttentionParams& p);

}  // namespace treadle::cuda
