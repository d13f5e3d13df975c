// A decoding row's tile: up to 16 query heads of one K/V head are the rows of the matrix
// instructions, so K and V are read once for all of them. The four warps share each block: of the
// scores each makes those of 16 positions, of the vectors those of a quarter of the features.
// Every number comes from the same instructions in the same order as in a prompt's tile, so it has
// the same bits.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention/attention_kv.h"
#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/attention/attention_prompt.h"
#include "kernels/cuda/attention/attention_state.h"

namespace treadle::cuda {

template <DType kType, int kD>
class DecodeTile {
 public:
  // Features go to warps in groups of 16: group w + 4 i to warp w.
  static constexpr int kGroups = (kD / 16 + kAttentionWarps - 1) / kAttentionWarps;
  using State = SoftmaxState<1, 2 * kGroups>;
  static constexpr int kWeightRowBytes = 2 * kBlockPositions + 16;
  static constexpr int kExchangeBytes = kMmaRows * kWeightRowBytes + 4 * kAttentionWarps * kMmaRows;
  static constexpr int kSharedBytes = (KvPipeline<kD>::kBytes + kExchangeBytes + 15) / 16 * 16;

  TREADLE_DEVICE DecodeTile(const AttentionParams& p, const AttentionTile& tile, TileHeads heads,
                            char* shared)
      : p_(p),
        tile_(tile),
        heads_(heads),
        shared_(shared),
        weights_(shared + KvPipeline<kD>::kBytes),
        maxima_(reinterpret_cast<float*>(weights_ + kMmaRows * kWeightRowBytes)) {
    const float* q[2];
    for (int half = 0; half < 2; ++half) {
      const bool valid = Head(half) < heads.count;
      q[half] =
          valid ? p.q + tile.first_row * p.q_stride + int64_t{heads.first + Head(half)} * p.head_dim
                : nullptr;
    }
    TREADLE_UNROLL
    for (int k = 0; k < kD / 16; ++k) {
      LoadQuery<kType>(q[0], q[1], k, p.head_dim, p.scale, query_[k]);
    }
    state_.Reset();
  }

  // Splits are spread over the grid's depth, or else all follow one another at depth 0.
  TREADLE_DEVICE void Run(const KvSource& source) {
    const int32_t position = tile_.first_position;
    const int32_t length = SplitLength(position);
    const bool spread = tile_.sequence < p_.split_sequences;
    if (simt::BlockZ() >= (spread ? SplitsOf(position) : 1)) return;

    const int seen = source.begin / kBlockPositions;
    const int split = spread ? simt::BlockZ() * (length / kBlockPositions) : 0;
    const int first = split > seen ? split : seen;
    const int all = CeilDivide(source.limit, kBlockPositions);
    const int last = split + length / kBlockPositions;
    const int end = spread && last < all ? last : all;
    if (first < end) {  // else all of this split is before the window
      KvPipeline<kD> pipeline(source, shared_, first, end);
      for (int block = first; block < end; ++block) {
        Scores(pipeline.Keys(block));
        Weights(block, source.begin, position);
        Vectors(pipeline.Values(block));
        const int32_t done = (block + 1) * kBlockPositions;
        if (!spread && done % length == 0 && position >= done) {
          EndSplit(/*first=*/seen * kBlockPositions >= done - length);
        }
      }
    }
    if (spread && position >= length) {
      StorePart();
    } else {
      StoreRow(/*join=*/HasEarlierSplits(position, seen));
    }
  }

 private:
  using Element = Element16<kType>;
  static constexpr int kRowBytes = KvPipeline<kD>::kRowBytes;

  TREADLE_DEVICE static int Head(int half) { return simt::Lane() / 4 + 8 * half; }
  TREADLE_DEVICE static int Feature(int n) {
    return 16 * (TeamWarp() + kAttentionWarps * (n / 2)) + 8 * (n % 2) + 2 * (simt::Lane() & 3);
  }

  // The scores of positions 16 w .. 16 w + 15 of the block.
  TREADLE_DEVICE void Scores(const char* keys) {
    TREADLE_UNROLL
    for (int e = 0; e < 4; ++e) score_[0][e] = score_[1][e] = 0;
    TREADLE_UNROLL
    for (int k = 0; k < kD / 16; ++k) {
      uint32_t b[4];
      simt::LoadMatrix4(b, MatrixRow<false>(keys, kRowBytes, 16 * TeamWarp(), 16 * k));
      Element::Mma(score_[0], query_[k], b[0], b[1]);
      Element::Mma(score_[1], query_[k], b[2], b[3]);
    }
  }
  // Scores become weights, and these go to shared memory, [16 heads, kBlockPositions].
  TREADLE_DEVICE void Weights(int block, int32_t begin, int32_t position) {
    const int own = 16 * TeamWarp() + 2 * (simt::Lane() & 3);
    TREADLE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float max = -simt::Infinity();
      TREADLE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& score = score_[i / 2][2 * half + i % 2];
        const int at = block * kBlockPositions + own + 8 * (i / 2) + i % 2;
        if (at > position || at < begin) score = -simt::Infinity();
        max = simt::Max(score, max);
      }
      max = QuadMax(max);
      if ((simt::Lane() & 3) == 0) maxima_[TeamWarp() * kMmaRows + Head(half)] = max;
    }
    simt::SyncWarpgroup();
    TREADLE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float max = maxima_[Head(half)];
      TREADLE_UNROLL
      for (int warp = 1; warp < kAttentionWarps; ++warp) {
        max = simt::Max(maxima_[warp * kMmaRows + Head(half)], max);
      }
      const float shift = state_.Raise(0, half, max);
      TREADLE_UNROLL
      for (int n = 0; n < 2; ++n) {
        const float* pair = &score_[n][2 * half];
        *reinterpret_cast<uint32_t*>(weights_ + Head(half) * kWeightRowBytes + 2 * (own + 8 * n)) =
            Element::PackWeights(Weight(pair[0], shift), Weight(pair[1], shift));
      }
    }
  }
  // The pipeline's barrier before `values` has also brought all warps' weights.
  TREADLE_DEVICE void Vectors(const char* values) {
    TREADLE_UNROLL
    for (int k = 0; k < kBlockPositions / 16; ++k) {
      uint32_t a[4];
      simt::LoadMatrix4(a, MatrixRow<true>(weights_, kWeightRowBytes, 0, 16 * k));
      Element::Mma(state_.sum[0], a, Element::kOnes, Element::kOnes);
      TREADLE_UNROLL
      for (int i = 0; i < kGroups; ++i) {
        const int group = TeamWarp() + kAttentionWarps * i;
        if (group >= kD / 16) continue;
        uint32_t b[4];
        simt::LoadMatrix4Transposed(b, MatrixRow<true>(values, kRowBytes, 16 * k, 16 * group));
        Element::Mma(state_.vector[0][2 * i], a, b[0], b[1]);
        Element::Mma(state_.vector[0][2 * i + 1], a, b[2], b[3]);
      }
    }
  }
  TREADLE_DEVICE void EndSplit(bool first) {
    state_.template EndSplit<1>(0, 0, first, kept_);
    state_.template EndSplit<1>(0, 1, first, kept_);
  }
  TREADLE_DEVICE void StorePart() const {
    TREADLE_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (Head(half) >= heads_.count) continue;
      const int64_t part = PartIndex(p_, tile_.sequence, heads_.first + Head(half), simt::BlockZ());
      if (TeamWarp() == 0 && (simt::Lane() & 3) == 0) {
        p_.part_stats[2 * part] = state_.max[0][half];
        p_.part_stats[2 * part + 1] = state_.sum[0][2 * half];
      }
      StoreVector(half, 1.0f, {p_.part_vectors}, part * p_.head_dim);
    }
  }
  TREADLE_DEVICE void StoreRow(bool join) {
    TREADLE_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (Head(half) >= heads_.count) continue;
      if (join) state_.template JoinKept<1>(0, half, kept_);
      StoreVector(
          half, simt::Divide(1.0f, state_.sum[0][2 * half]), p_.out,
          tile_.first_row * p_.out.stride + int64_t{heads_.first + Head(half)} * p_.head_dim);
    }
  }
  // From element `at` of `out` on.
  TREADLE_DEVICE void StoreVector(int half, float factor, const RowOutput& out, int64_t at) const {
    TREADLE_UNROLL
    for (int n = 0; n < 2 * kGroups; ++n) {
      const int feature = Feature(n);
      if (feature >= p_.head_dim) continue;
      const float* pair = &state_.vector[0][n][2 * half];
      StorePair(out, at + feature, pair[0] * factor, pair[1] * factor);
    }
  }

  const AttentionParams& p_;
  const AttentionTile tile_;
  const TileHeads heads_;
  char* const shared_;
  char* const weights_;
  float* const maxima_;  // [warps, 16]
  uint32_t query_[kD / 16][4];
  float score_[2][4];
  State state_;
  float kept_[State::kKept];
};

}  // namespace treadle::cuda
