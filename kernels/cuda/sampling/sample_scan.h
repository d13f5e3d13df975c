// The first pass over logits: a block takes the chunk of a row that its number says.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/simt.h"
#include "kernels/cuda/sampling/sample_block.h"
#include "kernels/cuda/sampling/sample_params.h"

namespace treadle::cuda {

struct ScanShared {
  float x[kChunk];  // logits; thread t has those at t, t + Threads(), ...
  uint64_t keys[kMaxShardCandidates * kPerThread];
  BlockScratch block;
};
static_assert(kMaxShardCandidates * kPerThread >= kScanThreads);

// Tokens [begin, begin + count) of a row.
struct Chunk {
  float* x;  // [count] shared
  int begin;
  int count;

  TREADLE_DEVICE uint64_t Key(int at) const { return OrderKey(CleanLogit(x[at]), begin + at); }
};

// Every thread gets the logits that it has; others see them after a barrier.
TREADLE_DEVICE void LoadChunk(const float* logits, const Chunk& chunk) {
  for (int base = simt::Thread(); base < chunk.count; base += kLoads * simt::Threads()) {
    float x[kLoads];
    TREADLE_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int at = base + i * simt::Threads();
      x[i] = at < chunk.count ? logits[at] : 0.0f;
    }
    TREADLE_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int at = base + i * simt::Threads();
      if (at < chunk.count) chunk.x[at] = x[i];
    }
  }
}

// The first `wanted` (at most 64) keys of the chunk to out, in order, then kNoCandidate. They are
// among the logits of at most `wanted` threads, those whose own first keys come first.
TREADLE_DEVICE void FirstOfChunk(const Chunk& chunk, int wanted, ScanShared& shared,
                                 uint64_t* out) {
  float best = -simt::Infinity();
  int best_at = simt::Thread();
  for (int at = simt::Thread(); at < chunk.count; at += simt::Threads()) {
    const float x = CleanLogit(chunk.x[at]);
    best_at = x > best ? at : best_at;
    best = x > best ? x : best;
  }
  uint64_t own = best_at < chunk.count ? OrderKey(best, chunk.begin + best_at) : kNoCandidate;
  if (wanted == 1) {
    own = BlockFirst(own, shared.block);
    if (simt::Thread() == 0) out[0] = own;
    return;
  }
  uint64_t last = kNoCandidate;
  if (wanted < simt::Threads()) {
    shared.keys[simt::Thread()] = own;
    BlockSort(shared.keys, simt::Threads());
    last = shared.keys[wanted - 1];
  }
  if (simt::Thread() == 0) shared.block.counter = 0;
  simt::SyncThreads();
  for (int at = simt::Thread(); own <= last && at < chunk.count; at += simt::Threads()) {
    const uint64_t key = chunk.Key(at);
    if (key <= last) shared.keys[simt::AtomicAdd(&shared.block.counter, 1)] = key;
  }
  simt::SyncThreads();
  const int count = static_cast<int>(shared.block.counter);
  BlockSort(shared.keys, count);
  for (int i = simt::Thread(); i < wanted; i += simt::Threads()) {
    out[i] = i < count ? shared.keys[i] : kNoCandidate;
  }
  simt::SyncThreads();
}

TREADLE_DEVICE void SumChunk(const Chunk& chunk, BlockScratch& scratch, ChunkSum* out) {
  float max = -simt::Infinity();
  for (int at = simt::Thread(); at < chunk.count; at += simt::Threads()) {
    const float x = CleanLogit(chunk.x[at]);
    max = x > max ? x : max;
  }
  max = BlockMax(max, scratch);
  double sum = 0;
  for (int at = simt::Thread(); at < chunk.count; at += simt::Threads()) {
    const float x = CleanLogit(chunk.x[at]);
    if (x > -simt::Infinity()) sum += static_cast<double>(simt::Exp(x - max));
  }
  sum = BlockSum(sum, scratch);
  if (simt::Thread() == 0) *out = {max, sum};
}

// Steps 1 to 3 but for what they make of NaN and infinities. A thread applies the biases of the
// tokens that it has, so that those of a token stay in their order. Ends with a barrier.
TREADLE_DEVICE void ChangeChunk(const SampleParams& p, const DeviceSampleRow& row,
                                const Chunk& chunk) {
  const int first = p.first_token + chunk.begin;  // in the whole vocabulary
  for (int i = 0; i < row.num_biases; ++i) {
    const LogitBias entry = p.biases[row.first_bias + i];
    const int at = entry.token - first;
    if (at < 0 || at >= chunk.count || at % simt::Threads() != simt::Thread()) continue;
    chunk.x[at] += entry.bias;
  }
  simt::SyncThreads();
  for (int i = simt::Thread(); i < row.num_counts; i += simt::Threads()) {
    const TokenCount entry = p.counts[row.first_count + i];
    const int at = entry.token - first;
    if (at < 0 || at >= chunk.count) continue;
    float x = chunk.x[at];
    x = x > 0.0f ? simt::Divide(x, row.repetition_penalty) : x * row.repetition_penalty;
    if (entry.in_output > 0) {
      x -= row.presence_penalty;
      x -= row.frequency_penalty * static_cast<float>(entry.in_output);
    }
    chunk.x[at] = x;
  }
  simt::SyncThreads();
  for (int i = simt::Thread(); i < row.num_suppressed; i += simt::Threads()) {
    const int at = p.suppressed[row.first_suppressed + i] - first;
    if (at >= 0 && at < chunk.count) chunk.x[at] = -simt::Infinity();
  }
  if (row.first_mask_word >= 0) {
    for (int at = simt::Thread(); at < chunk.count; at += simt::Threads()) {
      const int token = first + at;
      const uint32_t word = p.mask_words[row.first_mask_word + token / 32];
      if (((word >> (token % 32)) & 1u) == 0) chunk.x[at] = -simt::Infinity();
    }
  }
  simt::SyncThreads();
}

TREADLE_DEVICE void ScanChunk(const SampleParams& p, ScanShared& shared) {
  const DeviceSampleRow& row = p.samples[simt::BlockY()];
  if (row.sample == 0 && !WantsLogprobs(row)) return;
  const int begin = simt::BlockX() * kChunk;
  const Chunk chunk = {shared.x, begin, p.vocab - begin < kChunk ? p.vocab - begin : kChunk};
  LoadChunk(p.logits + simt::BlockY() * p.stride + begin, chunk);

  const int64_t part = int64_t{simt::BlockY()} * p.chunks + simt::BlockX();
  if (WantsLogprobs(row)) {
    SumChunk(chunk, shared.block, p.scratch.sums + part);
    const int top = NumTop(row, p.vocab);
    if (top > 0) FirstOfChunk(chunk, top, shared, p.scratch.top + part * kMaxTopLogprobs);
  }
  if (row.sample == 0) return;
  const bool at_length = DrawsAtLength(row, p.vocab);
  if (IsChanged(row)) {
    ChangeChunk(p, row, chunk);
    float* changed = p.scratch.changed + int64_t{simt::BlockY()} * p.vocab + begin;
    for (int at = simt::Thread(); at_length && at < chunk.count; at += simt::Threads()) {
      changed[at] = chunk.x[at];
    }
  }
  const int wanted = at_length ? 1 : NumFirst(row, p.vocab);
  FirstOfChunk(chunk, wanted, shared, p.scratch.first + part * kMaxShardCandidates);
}

}  // namespace treadle::cuda
