// A prompt's tile: up to 64 kM (row, head) pairs of one K/V head, each warp 16 kM of them against
// every block that the last row sees. Scores and weights stay in registers.
//
// Positions after a row's own weigh zero, but zero times NaN is NaN: in blocks that some row sees
// in part, what is not finite in V is taken out first and added afterwards to the rows that see it.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention_kv.h"
#include "kernels/cuda/attention_params.h"
#include "kernels/cuda/attention_state.h"
#include "kernels/cuda/kv_element.h"

namespace treadle::cuda {

// The pairs of a K/V head that a tile works on.
struct TileHeads {
  int32_t first = 0;  // query head
  int32_t count = 0;
};

template <DType kType, int kD, int kM>
class PromptTile {
 public:
  using State = SoftmaxState<kM, kD / 8>;
  static constexpr int kPairs = 16 * kM * kAttentionWarps;
  // Blocks of K and V, what threads keep of earlier splits, and one word.
  static constexpr int kKeptBytes = 4 * kAttentionThreads * State::kKept;
  static constexpr int kSharedBytes = KvPipeline<kD>::kBytes + kKeptBytes + 4;

  TREADLE_DEVICE PromptTile(const AttentionParams& p, const AttentionTile& tile, TileHeads heads)
      : p_(p), tile_(tile), heads_(heads) {
    TREADLE_UNROLL
    for (int m = 0; m < kM; ++m) {
      const float* q[2];
      TREADLE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int64_t offset = Locate(m, half, p.q_stride);
        q[half] = offset < 0 ? nullptr : p.q + offset;
        position_[m][half] = offset < 0 ? -1 : tile.first_position + Pair(m, half) / heads.count;
      }
      TREADLE_UNROLL
      for (int k = 0; k < kD / 16; ++k) {
        LoadQuery<kType>(q[0], q[1], k, p.head_dim, p.scale, query_[m][k]);
      }
    }
    state_.Reset();
  }

  TREADLE_DEVICE void Run(const KvSource& source, char* shared) {
    const int end = CeilDivide(source.limit, kBlockPositions);
    float* kept = reinterpret_cast<float*>(shared + KvPipeline<kD>::kBytes) + simt::Thread();
    auto* spoiled = reinterpret_cast<uint32_t*>(shared + KvPipeline<kD>::kBytes + kKeptBytes);
    if (simt::Thread() == 0) *spoiled = 0;
    KvPipeline<kD> pipeline(source, shared, 0, end);
    for (int block = 0; block < end; ++block) {
      char* keys = pipeline.Keys(block);
      Scores(keys);
      const bool partly_seen = (block + 1) * kBlockPositions - 1 > tile_.first_position;
      if (partly_seen) Mask(block);
      Weights();
      char* values = pipeline.Values(block);
      if (partly_seen) TakeOut(values, keys, spoiled);
      Vectors(values);
      if (partly_seen && *spoiled != 0) PutBack(block, keys);
      EndSplits((block + 1) * kBlockPositions, kept);
    }
    Store(kept);
  }

 private:
  using Element = Element16<kType>;
  static constexpr int kRowBytes = KvPipeline<kD>::kRowBytes;
  static constexpr int kGroups = kBlockPositions / 8;

  TREADLE_DEVICE static int Pair(int m, int half) {
    return (simt::Warp() * kM + m) * 16 + 8 * half + simt::Lane() / 4;
  }
  // Of a pair's head in a [rows, heads * head_dim] matrix; -1: there is no such pair.
  TREADLE_DEVICE int64_t Locate(int m, int half, int64_t stride) const {
    const int pair = Pair(m, half);
    const int row = pair / heads_.count;
    if (row >= tile_.rows) return -1;
    return (tile_.first_row + row) * stride +
           int64_t{heads_.first + pair % heads_.count} * p_.head_dim;
  }

  TREADLE_DEVICE void Scores(const char* keys) {
    TREADLE_UNROLL
    for (int m = 0; m < kM; ++m) {
      TREADLE_UNROLL
      for (int n = 0; n < kGroups; ++n) {
        TREADLE_UNROLL
        for (int e = 0; e < 4; ++e) score_[m][n][e] = 0;
      }
    }
    TREADLE_UNROLL
    for (int k = 0; k < kD / 16; ++k) {
      TREADLE_UNROLL
      for (int n = 0; n < kGroups; n += 2) {
        uint32_t b[4];
        simt::LoadMatrix4(b, MatrixRow<false>(keys, kRowBytes, 8 * n, 16 * k));
        TREADLE_UNROLL
        for (int m = 0; m < kM; ++m) {
          Element::Mma(score_[m][n], query_[m][k], b[0], b[1]);
          Element::Mma(score_[m][n + 1], query_[m][k], b[2], b[3]);
        }
      }
    }
  }
  // Positions after a row's own are blended out.
  TREADLE_DEVICE void Mask(int block) {
    const int first = block * kBlockPositions + 2 * (simt::Lane() & 3);
    TREADLE_UNROLL
    for (int m = 0; m < kM; ++m) {
      TREADLE_UNROLL
      for (int n = 0; n < kGroups; ++n) {
        TREADLE_UNROLL
        for (int e = 0; e < 4; ++e) {
          if (first + 8 * n + e % 2 > position_[m][e / 2]) score_[m][n][e] = -simt::Infinity();
        }
      }
    }
  }
  // Scores become weights.
  TREADLE_DEVICE void Weights() {
    TREADLE_UNROLL
    for (int m = 0; m < kM; ++m) {
      TREADLE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float max = -simt::Infinity();
        TREADLE_UNROLL
        for (int n = 0; n < kGroups; ++n) {
          TREADLE_UNROLL
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            max = score_[m][n][e] > max ? score_[m][n][e] : max;
          }
        }
        const float shift = state_.Raise(m, half, QuadMax(max));
        TREADLE_UNROLL
        for (int n = 0; n < kGroups; ++n) {
          TREADLE_UNROLL
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            score_[m][n][e] = Weight(score_[m][n][e], shift);
          }
        }
      }
    }
  }
  TREADLE_DEVICE void Vectors(const char* values) {
    TREADLE_UNROLL
    for (int k = 0; k < kBlockPositions / 16; ++k) {
      uint32_t a[kM][4];
      TREADLE_UNROLL
      for (int m = 0; m < kM; ++m) {
        TREADLE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float* pair = &score_[m][2 * k + i / 2][2 * (i % 2)];
          a[m][i] = Element::PackWeights(pair[0], pair[1]);
        }
        Element::Mma(state_.sum[m], a[m], Element::kOnes, Element::kOnes);
      }
      TREADLE_UNROLL
      for (int n = 0; n < kD / 8; n += 2) {
        uint32_t b[4];
        simt::LoadMatrix4Transposed(b, MatrixRow<true>(values, kRowBytes, 16 * k, 8 * n));
        TREADLE_UNROLL
        for (int m = 0; m < kM; ++m) {
          Element::Mma(state_.vector[m][n], a[m], b[0], b[1]);
          Element::Mma(state_.vector[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
  // Moves what is not finite from the block's V to its K, which is not needed any more; all else
  // there becomes zero. `spoiled`: some block had such a thing.
  TREADLE_DEVICE void TakeOut(char* values, char* keys, uint32_t* spoiled) const {
    constexpr int kChunks = kD / 8;  // of 16 bytes in a row
    for (int i = simt::Thread(); i < kBlockPositions * kChunks; i += kAttentionThreads) {
      const int at = i / kChunks * kRowBytes + i % kChunks * 16;
      auto* value = reinterpret_cast<simt::Words4*>(values + at);
      const simt::Words4 from = *value;
      const simt::Words4 bad = {Element::NotFinite(from.x), Element::NotFinite(from.y),
                                Element::NotFinite(from.z), Element::NotFinite(from.w)};
      *reinterpret_cast<simt::Words4*>(keys + at) = bad;
      if ((bad.x | bad.y | bad.z | bad.w) == 0) continue;
      *value = {from.x ^ bad.x, from.y ^ bad.y, from.z ^ bad.z, from.w ^ bad.w};
      simt::AtomicOr(spoiled, 1);
    }
    simt::SyncThreads();
  }
  // What is seen has a positive weight, so a sum takes an infinity or a NaN as it is.
  TREADLE_DEVICE void PutBack(int block, const char* taken) {
    for (int p = 0; p < kBlockPositions; ++p) {
      const char* row = taken + p * kRowBytes;
      TREADLE_UNROLL
      for (int n = 0; n < kD / 8; ++n) {
        const int feature = 8 * n + 2 * (simt::Lane() & 3);
        const auto word = *reinterpret_cast<const uint32_t*>(row + 2 * feature);
        if (word == 0) continue;
        TREADLE_UNROLL
        for (int m = 0; m < kM; ++m) {
          TREADLE_UNROLL
          for (int e = 0; e < 4; ++e) {
            const auto bits = static_cast<uint16_t>(word >> 16 * (e % 2));
            const bool sees = block * kBlockPositions + p <= position_[m][e / 2];
            if (sees && bits != 0) state_.vector[m][n][e] += KvElement<kType>::Load(bits);
          }
        }
      }
    }
  }
  // `end`: positions done.
  TREADLE_DEVICE void EndSplits(int end, float* kept) {
    if (end % kMinSplitPositions != 0) return;
    TREADLE_UNROLL
    for (int m = 0; m < kM; ++m) {
      TREADLE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int32_t length = SplitLength(position_[m][half]);
        if ((end & (length - 1)) != 0 || position_[m][half] < end) continue;
        state_.template EndSplit<kAttentionThreads>(m, half, /*first=*/end == length, kept);
      }
    }
  }
  TREADLE_DEVICE void Store(const float* kept) {
    TREADLE_UNROLL
    for (int m = 0; m < kM; ++m) {
      TREADLE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int64_t offset = Locate(m, half, p_.out_stride);
        if (offset < 0) continue;
        if (SplitsOf(position_[m][half]) > 1)
          state_.template JoinKept<kAttentionThreads>(m, half, kept);
        const float inverse = simt::Divide(1.0f, state_.sum[m][2 * half]);
        TREADLE_UNROLL
        for (int n = 0; n < kD / 8; ++n) {
          const int feature = 8 * n + 2 * (simt::Lane() & 3);
          if (feature >= p_.head_dim) continue;
          p_.out[offset + feature] = state_.vector[m][n][2 * half] * inverse;
          p_.out[offset + feature + 1] = state_.vector[m][n][2 * half + 1] * inverse;
        }
      }
    }
  }

  const AttentionParams& p_;
  const AttentionTile tile_;
  const TileHeads heads_;
  int32_t position_[kM][2];  // -1: no such pair
  uint32_t query_[kM][kD / 16][4];
  float score_[kM][kGroups][4];
  State state_;
};

}  // namespace treadle::cuda
