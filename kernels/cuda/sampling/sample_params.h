// The arguments of the sampling kernels: the parameters of a launch, its scratch memory, and what a
// row asks.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/batch.h"
#include "kernels/cuda/runtime/simt.h"
#include "kernels/cuda/sampling/sample_block.h"
#include "kernels/sampling.h"

namespace treadle::cuda {

inline constexpr int kScanThreads = 512;
inline constexpr int kPerThread = 16;  // logits of a thread of the scan, at most
inline constexpr int kChunk = kScanThreads * kPerThread;
inline constexpr int kFinishThreads = 1024;

// Maximum and sum of the raw logits of a chunk.
struct ChunkSum {
  float max;
  double sum;  // of exp(logit - max)
};

// Scratch of a launch; every array is by row, then by chunk.
struct Scratch {
  uint64_t* first;  // [rows, chunks, kMaxShardCandidates] keys: the first candidates, in order
  uint64_t* top;    // [rows, chunks, kMaxTopLogprobs] keys of raw logits, in order
  ChunkSum* sums;   // [rows, chunks]
  uint32_t* bins;   // [rows, chunks, Histogram::kWords]
  float* changed;   // [rows, vocab] after steps 1 to 3, of rows that need it
};

struct SampleParams {
  const float* logits;  // [rows, vocab]
  int64_t stride;
  int32_t vocab;  // of the shard
  int32_t first_token;
  int32_t chunks;
  const DeviceSampleRow* samples;  // [rows]
  const TokenCount* counts;
  const int32_t* suppressed;
  const LogitBias* biases;
  const uint32_t* mask_words;
  Scratch scratch;
  SampleResult* results;  // [rows], or null
  int32_t* last_samples;  // [rows], or null
  ShardSample* shards;    // [rows], or null
};

// -- what a row asks ------------------------------------------------------------------------------

TREADLE_DEVICE bool WantsLogprobs(const DeviceSampleRow& row) { return row.top_logprobs >= 0; }

// How many first candidates of a vocabulary, or shard, decide the row (NumShardCandidates); 0:
// nothing is sampled, or they would be too many.
TREADLE_DEVICE int NumFirst(const DeviceSampleRow& row, int vocab) {
  if (row.sample == 0) return 0;
  const int wanted = row.temperature == 0.0f ? 1 : row.top_k;
  if (wanted < 1 || wanted > kMaxShardCandidates) return 0;
  return wanted < vocab ? wanted : vocab;
}
// Whether the finishing block draws from the whole row.
TREADLE_DEVICE bool DrawsAtLength(const DeviceSampleRow& row, int vocab) {
  return row.sample != 0 && NumFirst(row, vocab) == 0;
}
TREADLE_DEVICE int NumTop(const DeviceSampleRow& row, int vocab) {
  return row.top_logprobs < vocab ? row.top_logprobs : vocab;
}
TREADLE_DEVICE bool IsChanged(const DeviceSampleRow& row) {
  return row.num_biases > 0 || row.num_counts > 0 || row.num_suppressed > 0 ||
         row.first_mask_word >= 0;
}

}  // namespace treadle::cuda
