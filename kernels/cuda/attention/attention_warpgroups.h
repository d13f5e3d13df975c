// A prompt's tile on warpgroups (warpgroup.h): two of them, each 64 (row, head) pairs of one K/V
// head against every block that the last row sees; K and V are copied once for both.
//
// While a warpgroup makes weights of its scores, its scores of the next block are on their way, and
// the other warpgroup has the matrix unit when this one has not (compare FlashAttention-3, section
// 3.2, with a barrier per block in place of its producer warps). The numbers that enter a row's
// sums, and their order, are those of attention_prompt.h; but nobody promises that the unit rounds
// as a warp's does, so `--deterministic` does without.
//
// The expected cost of a block of 64 positions to a multiprocessor, with heads of 128 features
// (estimates from the machine code): 1024 cycles of matrix unit for both warpgroups, which read 64
// bytes of shared memory a cycle meanwhile, and 32 more that copies write; 660 cycles of
// instructions, with 540 of exponentials among them, of which the scores under way hide about half.
// So 1250 to 1450 cycles: 50 to 60 % of 989 TFLOP/s, less a prompt's first and last block. An H100
// took 219 us for 2,048 positions, 20 % of its bf16 peak, and nobody knows yet why
// (bench/results/2026-11-26-h100.md). Such a block has a multiprocessor for itself (232 registers,
// 147 KB).
#pragma once

#include <cstdint>

#include "kernels/cuda/attention/attention_kernel.h"
#include "kernels/cuda/attention/attention_prompt_rows.h"
#include "kernels/cuda/attention/attention_warpgroups_kv.h"
#include "kernels/cuda/runtime/warpgroup.h"

namespace treadle::cuda {

template <DType kType, int kD>
class WarpgroupTile {
 public:
  using Kv = WarpgroupKv<kD>;
  using Rows = PromptRows<kType, kD, 1, typename Kv::Layout>;
  static constexpr int kThreads = Kv::Layout::kThreads;
  static constexpr int kPairs = kThreads / 2;
  // Blocks of K and V, what is taken out of V, what the rows keep, and one word.
  static constexpr int kTakenAt = Kv::kBytes;
  static constexpr int kKeptAt = kTakenAt + Kv::kPartBytes;
  static constexpr int kSpoiledAt = kKeptAt + Rows::kKeptBytes;
  static constexpr int kSharedBytes = kSpoiledAt + 4;

  TREADLE_DEVICE WarpgroupTile(const AttentionParams& p, const AttentionTile& tile, TileHeads heads,
                               char* shared)
      : rows_(p, tile, heads), shared_(shared) {}

  TREADLE_DEVICE void Run(const KvSource& source) {
    const int first = rows_.FirstBlock();
    const int end = CeilDivide(source.limit, kBlockPositions);
    if (simt::Thread() == 0) *Spoiled() = 0;
    Kv kv(source, shared_, first, end);
    // Two, so that what is on its way and what is at hand need no copies.
    Scores even = {};
    Scores odd = {};
    kv.FirstKeys();
    BeginScores(kv.Keys(first), even);
    simt::WarpgroupWait<0>();
    simt::Pin(even[0]);
    for (int block = first; block < end; block += 2) {
      Step(kv, block, even, odd);
      if (block + 1 < end) Step(kv, block + 1, odd, even);
    }
    rows_.Store(Kept());
  }

 private:
  using Element = Element16<kType>;
  using Scores = typename Rows::Scores;

  TREADLE_DEVICE uint32_t* Spoiled() const {
    return reinterpret_cast<uint32_t*>(shared_ + kSpoiledAt);
  }
  TREADLE_DEVICE float* Kept() const {
    return reinterpret_cast<float*>(shared_ + kKeptAt) + simt::Thread();
  }

  // A block whose scores are `now`; those of the one after it become `next`, also if there is none:
  // nobody looks at them.
  TREADLE_DEVICE void Step(Kv& kv, int block, Scores& now, Scores& next) {
    kv.Advance(block);
    BeginScores(kv.Keys(block + 1), next);
    const bool sees_part = rows_.SeesPart(block);
    if (sees_part) rows_.Mask(block, now);
    rows_.Weights(now);
    char* const values = kv.Values(block);
    char* const taken = shared_ + kTakenAt;
    if (sees_part) {
      rows_.TakeOut(values, taken, Spoiled());
      simt::AsyncFence();
      simt::SyncThreads();
    }
    AddVectors(values, now);
    simt::WarpgroupWait<0>();
    simt::Pin(next[0]);
    simt::Pin(rows_.state.vector[0]);
    if (sees_part && *Spoiled() != 0) rows_.PutBack(block, taken);
    rows_.EndSplits((block + 1) * kBlockPositions, Kept());
  }

  TREADLE_DEVICE void BeginScores(const char* keys, Scores& scores) {
    const simt::SharedMatrix matrix = simt::MatrixAt(keys, 8 * simt::kMatrixRowBytes, 0);
    simt::Pin(rows_.query[0]);
    simt::WarpgroupFence();
    TREADLE_UNROLL
    for (int k = 0; k < kD / 16; ++k) {
      simt::WarpgroupMma<kType, simt::RowsOf::kColumns>(
          scores[0], rows_.query[0][k], simt::Advance(matrix, k / 4 * Kv::kHalfBytes + k % 4 * 32),
          k > 0);
    }
    simt::WarpgroupCommit();
  }
  TREADLE_DEVICE void AddVectors(const char* values, const Scores& weights) {
    constexpr int kSteps = kBlockPositions / 16;
    uint32_t a[kSteps][4];
    TREADLE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      uint32_t packed[1][4];
      Rows::Pack(weights, k, packed);
      TREADLE_UNROLL
      for (int i = 0; i < 4; ++i) a[k][i] = packed[0][i];
      Element::Mma(rows_.state.sum[0], a[k], Element::kOnes, Element::kOnes);
    }
    const simt::SharedMatrix matrix =
        simt::MatrixAt(values, 8 * simt::kMatrixRowBytes, Kv::kHalfBytes);
    simt::Pin(a);
    simt::Pin(rows_.state.vector[0]);
    simt::WarpgroupFence();
    TREADLE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      simt::WarpgroupMma<kType, simt::RowsOf::kTerms>(
          rows_.state.vector[0], a[k], simt::Advance(matrix, k * 16 * simt::kMatrixRowBytes), true);
    }
    simt::WarpgroupCommit();
  }

  Rows rows_;
  char* const shared_;
};

template <DType kType>
AttentionCode WarpgroupAttention(int64_t head_dim) {
  if (head_dim > 128) return {};
  if (head_dim > 64) return MakeAttentionCode<kType, 128, WarpgroupTile<kType, 128>>();
  if (head_dim > 32) return MakeAttentionCode<kType, 64, WarpgroupTile<kType, 64>>();
  return {};
}

}  // namespace treadle::cuda
