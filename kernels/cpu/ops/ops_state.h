// The state of CpuOps between calls: scratch that grows and is never given back, so that the steady
// state allocates nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cpu/ops/attention_kernels.h"
#include "kernels/cpu/ops/cpu_ops.h"
#include "kernels/cpu/weight_arena.h"

namespace treadle {

// Rows of one sequence and one K/V head.
struct AttentionItem {
  AttentionArguments arguments;
  int64_t partial_offset;  // floats, if it is split
};

// A range of an item's blocks.
struct AttentionPiece {
  int64_t cost;  // of the whole piece, in query-position pairs
  int32_t item;
  int32_t block_begin;
  int32_t block_end;
};

// Rows of a product in AddLowRank.
struct LowRankBlock {
  const LowRankProduct* product;
  int64_t first, count;  // of its rows
  int64_t h;             // where their sums lie, in floats
};
struct LowRankPiece {
  int32_t block, part;
};

// A token that may be drawn.
struct Candidate {
  float logit;  // as modified
  int32_t token;
  float weight;  // exp((logit - largest) / temperature)
};

// One thread's, or for a single row everybody's, memory for sampling; sized by the vocabulary.
struct SampleScratch {
  std::vector<float> raw;  // logits before modification, where log probabilities need them
  std::vector<float> chunk_max;
  std::vector<float> chunk_sum;
  std::vector<Candidate> candidates;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

struct CpuOps::State {
  State(ThreadPool& pool_in, CpuIsa isa_in) : pool(pool_in), isa(isa_in) {}

  ThreadPool& pool;
  const CpuIsa isa;

  // Attention: `items` to `pieces`, and their execution.
  void PlanAttention();
  void RunAttention();

  bool serial_attention = false;
  std::vector<AttentionItem> items;
  std::vector<AttentionPiece> pieces;
  std::vector<int32_t> split_items;
  ScratchMemory attention_scratch;  // [threads, floats of the largest item]
  ScratchMemory partials;

  ScratchMemory delta_scratch;  // [threads, DeltaScratchFloats]

  std::vector<LowRankBlock> low_rank_blocks;
  std::vector<LowRankPiece> low_rank_downs, low_rank_ups;
  ScratchMemory low_rank_scratch;

  // Sampling.
  std::vector<SampleScratch> sample_scratch;  // [threads]
};

}  // namespace treadle
