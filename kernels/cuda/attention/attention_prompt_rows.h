// The part of every kernel of prompts that is alike whatever multiplies its (row, head) pairs:
// queries, masks, the softmax, splits and results. A warp has 16 kM pairs, in the registers of the
// matrix instructions.
//
// Positions after a row's own, or before its window, weigh zero, but zero times NaN is NaN: in
// blocks that some row sees in part, what is not finite in V is taken out first and added
// afterwards to the rows that see it.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/attention/attention_state.h"
#include "kernels/cuda/attention/kv_element.h"

namespace treadle::cuda {

// The pairs of a K/V head that a tile works on.
struct TileHeads {
  int32_t first = 0;  // query head
  int32_t count = 0;
};

// Layout: kThreads of a block, kKeptStride between the floats that a thread keeps of earlier
// splits, and where 16 bytes of a block of K or V lie in shared memory: Piece(position, piece), in
// bytes.
template <DType kType, int kD, int kM, typename Layout>
class PromptRows {
 public:
  using State = SoftmaxState<kM, kD / 8>;
  using Element = Element16<kType>;
  static constexpr int kGroups = kBlockPositions / 8;
  using Scores = float[kM][kGroups][4];
  // Bytes that threads keep of earlier splits.
  static constexpr int kKeptBytes = 4 * Layout::kThreads * State::kKept;

  uint32_t query[kM][kD / 16][4];
  State state;

  TREADLE_DEVICE PromptRows(const AttentionParams& p, const AttentionTile& tile, TileHeads heads)
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
        LoadQuery<kType>(q[0], q[1], k, p.head_dim, p.scale, query[m][k]);
      }
    }
    state.Reset();
  }

  // Whether some row does not see all of the block.
  TREADLE_DEVICE bool SeesPart(int block) const {
    return (block + 1) * kBlockPositions - 1 > tile_.first_position ||
           block * kBlockPositions < FirstSeen(tile_.first_position + tile_.rows - 1, p_.window);
  }
  // The first block that some row sees.
  TREADLE_DEVICE int FirstBlock() const {
    return FirstSeen(tile_.first_position, p_.window) / kBlockPositions;
  }
  // Blends out the positions that a row does not see.
  TREADLE_DEVICE void Mask(int block, Scores& scores) const {
    const int first = block * kBlockPositions + 2 * (simt::Lane() & 3);
    TREADLE_UNROLL
    for (int m = 0; m < kM; ++m) {
      TREADLE_UNROLL
      for (int n = 0; n < kGroups; ++n) {
        TREADLE_UNROLL
        for (int e = 0; e < 4; ++e) {
          if (!Sees(position_[m][e / 2], first + 8 * n + e % 2))
            scores[m][n][e] = -simt::Infinity();
        }
      }
    }
  }
  // Scores become weights.
  TREADLE_DEVICE void Weights(Scores& scores) {
    TREADLE_UNROLL
    for (int m = 0; m < kM; ++m) {
      TREADLE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float max = -simt::Infinity();
        TREADLE_UNROLL
        for (int n = 0; n < kGroups; ++n) {
          TREADLE_UNROLL
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            max = simt::Max(scores[m][n][e], max);
          }
        }
        const float shift = state.Raise(m, half, QuadMax(max));
        TREADLE_UNROLL
        for (int n = 0; n < kGroups; ++n) {
          TREADLE_UNROLL
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            scores[m][n][e] = Weight(scores[m][n][e], shift);
          }
        }
      }
    }
  }
  // Weights of positions 16 k .. 16 k + 15 as fragments A.
  TREADLE_DEVICE static void Pack(const Scores& scores, int k, uint32_t (&a)[kM][4]) {
    TREADLE_UNROLL
    for (int m = 0; m < kM; ++m) {
      TREADLE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* pair = &scores[m][2 * k + i / 2][2 * (i % 2)];
        a[m][i] = Element::PackWeights(pair[0], pair[1]);
      }
    }
  }
  // Moves what is not finite from a block's V to `taken`, where all else becomes zero. `spoiled`:
  // some block had such a thing. A barrier after it.
  TREADLE_DEVICE void TakeOut(char* values, char* taken, uint32_t* spoiled) const {
    constexpr int kChunks = kD / 8;  // of 16 bytes in a row
    for (int i = simt::Thread(); i < kBlockPositions * kChunks; i += Layout::kThreads) {
      const int at = Layout::Piece(i / kChunks, i % kChunks);
      auto* value = reinterpret_cast<simt::Words4*>(values + at);
      const simt::Words4 from = *value;
      const simt::Words4 bad = {Element::NotFinite(from.x), Element::NotFinite(from.y),
                                Element::NotFinite(from.z), Element::NotFinite(from.w)};
      *reinterpret_cast<simt::Words4*>(taken + at) = bad;
      if ((bad.x | bad.y | bad.z | bad.w) == 0) continue;
      *value = {from.x ^ bad.x, from.y ^ bad.y, from.z ^ bad.z, from.w ^ bad.w};
      simt::AtomicOr(spoiled, 1);
    }
  }
  // A position that is seen has a positive weight, so a sum takes an infinity or a NaN as it is.
  TREADLE_DEVICE void PutBack(int block, const char* taken) {
    for (int p = 0; p < kBlockPositions; ++p) {
      TREADLE_UNROLL
      for (int n = 0; n < kD / 8; ++n) {
        const int at = Layout::Piece(p, n) + 4 * (simt::Lane() & 3);
        const auto word = *reinterpret_cast<const uint32_t*>(taken + at);
        if (word == 0) continue;
        TREADLE_UNROLL
        for (int m = 0; m < kM; ++m) {
          TREADLE_UNROLL
          for (int e = 0; e < 4; ++e) {
            const auto bits = static_cast<uint16_t>(word >> 16 * (e % 2));
            const bool sees = Sees(position_[m][e / 2], block * kBlockPositions + p);
            if (sees && bits != 0) state.vector[m][n][e] += KvElement<kType>::Load(bits);
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
        const bool opening = FirstBlock() * kBlockPositions >= end - length;
        state.template EndSplit<Layout::kKeptStride>(m, half, opening, kept);
      }
    }
  }
  TREADLE_DEVICE void Store(const float* kept) {
    TREADLE_UNROLL
    for (int m = 0; m < kM; ++m) {
      TREADLE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int64_t offset = Locate(m, half, p_.out.stride);
        if (offset < 0) continue;
        if (HasEarlierSplits(position_[m][half], FirstBlock()))
          state.template JoinKept<Layout::kKeptStride>(m, half, kept);
        const float inverse = simt::Divide(1.0f, state.sum[m][2 * half]);
        TREADLE_UNROLL
        for (int n = 0; n < kD / 8; ++n) {
          const int feature = 8 * n + 2 * (simt::Lane() & 3);
          if (feature >= p_.head_dim) continue;
          const float* pair = &state.vector[m][n][2 * half];
          StorePair(p_.out, offset + feature, pair[0] * inverse, pair[1] * inverse);
        }
      }
    }
  }

 private:
  TREADLE_DEVICE static int Pair(int m, int half) {
    return (simt::Warp() * kM + m) * 16 + 8 * half + simt::Lane() / 4;
  }
  TREADLE_DEVICE bool Sees(int32_t row_position, int32_t at) const {
    return at <= row_position && at >= FirstSeen(row_position, p_.window);
  }
  // Where a pair's head begins in a [rows, heads * head_dim] matrix; -1: there is no such pair.
  TREADLE_DEVICE int64_t Locate(int m, int half, int64_t stride) const {
    const int pair = Pair(m, half);
    const int row = pair / heads_.count;
    if (row >= tile_.rows) return -1;
    return (tile_.first_row + row) * stride +
           int64_t{heads_.first + pair % heads_.count} * p_.head_dim;
  }

  const AttentionParams& p_;
  const AttentionTile tile_;
  const TileHeads heads_;
  int32_t position_[kM][2];  // -1: no such pair
};

}  // namespace treadle::cuda
