// A prompt's tile: up to 64 kM (row, head) pairs of one K/V head, each warp 16 kM of them against
// every block that the last row sees. Scores and weights stay in registers.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention/attention_kv.h"
#include "kernels/cuda/attention/attention_prompt_rows.h"

namespace treadle::cuda {

// kSmall: what rows keep of earlier splits lies in the threads' own memory (L1, and L2 behind it)
// instead of shared memory; it is touched once a split. The bits are the same.
template <DType kType, int kD, int kM, bool kSmall = false>
class PromptTile {
 public:
  struct Layout {
    static constexpr int kThreads = kAttentionThreads;
    static constexpr int kKeptStride = kSmall ? 1 : kThreads;
    TREADLE_DEVICE static int Piece(int position, int piece) {
      return position * KvPipeline<kD>::kRowBytes + piece * 16;
    }
  };
  using Rows = PromptRows<kType, kD, kM, Layout>;
  static constexpr int kThreads = Layout::kThreads;
  static constexpr int kPairs = 16 * kM * kAttentionWarps;
  // Blocks of K and V, what the rows keep, and one word.
  static constexpr int kKeptBytes = kSmall ? 0 : Rows::kKeptBytes;
  static constexpr int kSharedBytes = KvPipeline<kD>::kBytes + kKeptBytes + 4;

  TREADLE_DEVICE PromptTile(const AttentionParams& p, const AttentionTile& tile, TileHeads heads,
                            char* shared)
      : rows_(p, tile, heads), shared_(shared) {}

  TREADLE_DEVICE void Run(const KvSource& source) {
    const int first = rows_.FirstBlock();
    const int end = CeilDivide(source.limit, kBlockPositions);
    float own[kSmall ? Rows::State::kKept : 1];
    float* kept = reinterpret_cast<float*>(shared_ + KvPipeline<kD>::kBytes) + simt::Thread();
    if constexpr (kSmall) kept = simt::InMemory(own);
    auto* spoiled = reinterpret_cast<uint32_t*>(shared_ + KvPipeline<kD>::kBytes + kKeptBytes);
    if (simt::Thread() == 0) *spoiled = 0;
    KvPipeline<kD> pipeline(source, shared_, first, end);
    for (int block = first; block < end; ++block) {
      char* keys = pipeline.Keys(block);
      Scores(keys);
      const bool sees_part = rows_.SeesPart(block);
      if (sees_part) rows_.Mask(block, scores_);
      rows_.Weights(scores_);
      char* values = pipeline.Values(block);
      if (sees_part) {
        rows_.TakeOut(values, keys, spoiled);  // the block's K is not needed any more
        simt::SyncThreads();
      }
      Vectors(values);
      if (sees_part && *spoiled != 0) rows_.PutBack(block, keys);
      rows_.EndSplits((block + 1) * kBlockPositions, kept);
    }
    rows_.Store(kept);
  }

 private:
  using Element = Element16<kType>;
  static constexpr int kRowBytes = KvPipeline<kD>::kRowBytes;

  TREADLE_DEVICE void Scores(const char* keys) {
    TREADLE_UNROLL
    for (int m = 0; m < kM; ++m) {
      TREADLE_UNROLL
      for (int n = 0; n < Rows::kGroups; ++n) {
        TREADLE_UNROLL
        for (int e = 0; e < 4; ++e) scores_[m][n][e] = 0;
      }
    }
    TREADLE_UNROLL
    for (int k = 0; k < kD / 16; ++k) {
      TREADLE_UNROLL
      for (int n = 0; n < Rows::kGroups; n += 2) {
        uint32_t b[4];
        simt::LoadMatrix4(b, MatrixRow<false>(keys, kRowBytes, 8 * n, 16 * k));
        TREADLE_UNROLL
        for (int m = 0; m < kM; ++m) {
          Element::Mma(scores_[m][n], rows_.query[m][k], b[0], b[1]);
          Element::Mma(scores_[m][n + 1], rows_.query[m][k], b[2], b[3]);
        }
      }
    }
  }
  TREADLE_DEVICE void Vectors(const char* values) {
    TREADLE_UNROLL
    for (int k = 0; k < kBlockPositions / 16; ++k) {
      uint32_t a[kM][4];
      Rows::Pack(scores_, k, a);
      TREADLE_UNROLL
      for (int m = 0; m < kM; ++m) {
        Element::Mma(rows_.state.sum[m], a[m], Element::kOnes, Element::kOnes);
      }
      TREADLE_UNROLL
      for (int n = 0; n < kD / 8; n += 2) {
        uint32_t b[4];
        simt::LoadMatrix4Transposed(b, MatrixRow<true>(values, kRowBytes, 16 * k, 8 * n));
        TREADLE_UNROLL
        for (int m = 0; m < kM; ++m) {
          Element::Mma(rows_.state.vector[m][n], a[m], b[0], b[1]);
          Element::Mma(rows_.state.vector[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  Rows rows_;
  char* const shared_;
  typename Rows::Scores scores_;
};

}  // namespace treadle::cuda
