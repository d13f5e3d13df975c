// Ops that need a batch's description or scratch memory, as launches on a Device. Contracts of the
// results: kernels/backend.h. All pointers are device addresses. Nothing here allocates or waits,
// so everything can be captured in a graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/backend.h"
#include "kernels/cuda/runtime/batch.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/kv_view.h"
#include "kernels/sampling.h"
#include "kernels/tensor.h"

namespace treadle::cuda {

// -- attention.cu ---------------------------------------------------------------------------------
// Pages of this backend hold K as [kv_heads, page_size, head_dim] (KeyOrder::kByPosition).
// rotary: its pointers are device addresses; null: no rotation.
void RotateAndStoreKv(Device& device, Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                      const KvLayout& layout, std::byte* pages, const DeviceBatch& batch);

// One launch over the whole ragged batch, prompt chunks and decoding rows alike (ORCA section 5),
// then one that combines the parts of long contexts. Parts are of fixed absolute positions, so a
// row's result does not depend on its neighbours or on how its prompt was cut (N1, N2); but prompts
// on warpgroups (attention_warpgroups.h) may round otherwise than a row that is alone in the batch,
// unless `deterministic`. kv.pages, kv.slopes and kv.sinks: on the device; kv.sequences: not read.
void Attention(Device& device, Tensor q, const KvView& kv, const DeviceBatch& batch, float scale,
               bool deterministic, std::span<std::byte> scratch, Tensor out);
// Scratch for batches of at most this many rows and this context. heads: query heads.
size_t AttentionScratchBytes(int64_t max_rows, int64_t max_context, int64_t heads,
                             int64_t head_dim);

// -- sample.cu ------------------------------------------------------------------------------------
// results: [rows] on the device; last_samples: [rows], each row's token once more, for the next
// batch. rows = logits.rows <= batch.num_output_rows; row i is batch.samples[first_row + i].
void Sample(Device& device, Tensor logits, int64_t first_row, const DeviceBatch& batch,
            std::span<std::byte> scratch, SampleResult* results, int32_t* last_samples);
void SampleShard(Device& device, Tensor logits, int32_t first_token, int64_t first_row,
                 const DeviceBatch& batch, std::span<std::byte> scratch, ShardSample* shards);
size_t SampleScratchBytes(int64_t max_rows, int64_t vocab);

// -- elements.cu ----------------------------------------------------------------------------------
// The sum of an all-reduce, of parts that were gathered from all ranks: out = parts[0] + parts[1] +
// ..., or out + (that sum). parts: [ranks][count], out: [count] f32, not overlapping. One fixed
// order whatever the place in the buffer (N1, N3).
void RankSum(Device& device, const float* parts, int ranks, int64_t count, bool accumulate,
             float* out);

}  // namespace treadle::cuda
