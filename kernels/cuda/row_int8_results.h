// From a warp's sums to results: scales, outliers, bias, residual; in the registers that the matrix
// instructions left them in. Device code of row_int8_tiles.cu.
#pragma once

#include "kernels/cuda/row_int8_outliers.h"

namespace treadle::cuda {

// Warps of a block, and what each computes: 64 features x 8 kRows rows.
inline constexpr int kFeatureWarps = 2;
inline constexpr int kRowWarps = 4;
inline constexpr int kWarpGroups = 2;                      // of 32 features
inline constexpr int kWarpFeatureTiles = 2 * kWarpGroups;  // of the matrix instructions

template <int kRows>
using WarpSums = int32_t[kWarpFeatureTiles][kRows][4];

// Where a lane's results lie: four features from feature + 32 q on, in rows row + 8 r and the one
// after it of the block's tile.
struct LanePlace {
  int feature = 0;
  int row = 0;
};
template <int kRows>
TREADLE_DEVICE LanePlace LanePlaceOf() {
  const int warp = simt::Warp();
  const int lane = simt::Lane();
  return {warp % kFeatureWarps * kWarpGroups * kInt8GroupFeatures + lane / 4 * 4,
          warp / kFeatureWarps * kRows * kInt8TileRows + lane % 4 * 2};
}
// Feature i of the four of group q, row j of two.
template <int kRows>
TREADLE_DEVICE int32_t& ResultOf(WarpSums<kRows>& sums, int q, int i, int r, int j) {
  return sums[2 * q + i / 2][r][i % 2 * 2 + j];
}

// Sums become products; as bits, they stay in their registers.
template <int kRows>
TREADLE_DEVICE void ScaleSums(const Int8Input& input, const Int8Segment& segment,
                              const TilePlace& place, const LanePlace& at, WarpSums<kRows>& sums) {
  float scales[kWarpGroups][4];
  TREADLE_UNROLL
  for (int i = 0; i < 4 * kWarpGroups; ++i) {
    const int feature = place.feature0 + at.feature + i / 4 * kInt8GroupFeatures + i % 4;
    scales[i / 4][i % 4] = feature < segment.n ? segment.scales[feature] : 0.0f;
  }
  TREADLE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    TREADLE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const int row = place.row0 + at.row + 8 * r + j;
      const float row_scale = row < input.rows ? input.row_info[row].scale : 0.0f;
      TREADLE_UNROLL
      for (int i = 0; i < 4 * kWarpGroups; ++i) {
        int32_t& sum = ResultOf(sums, i / 4, i % 4, r, j);
        const float y = static_cast<float>(sum) * (scales[i / 4][i % 4] * row_scale);
        sum = static_cast<int32_t>(simt::AsBits(y));
      }
    }
  }
}

TREADLE_DEVICE void ToFloats(const simt::Words4& words, float (&x)[4]) {
  x[0] = simt::AsFloat(words.x);
  x[1] = simt::AsFloat(words.y);
  x[2] = simt::AsFloat(words.z);
  x[3] = simt::AsFloat(words.w);
}

// One chunk of outlier columns onto the results.
template <int kRows, typename Tile>
TREADLE_DEVICE void AddChunk(const Tile& tile, uint32_t taken_from, const LanePlace& at,
                             WarpSums<kRows>& sums) {
  for (int c = 0; c < tile.count; ++c) {
    float weights[kWarpGroups][4];
    TREADLE_UNROLL
    for (int q = 0; q < kWarpGroups; ++q) {
      const float* from = &tile.weights[c][at.feature + q * kInt8GroupFeatures];
      ToFloats(*reinterpret_cast<const simt::Words4*>(from), weights[q]);
    }
    TREADLE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float x[2] = {tile.x[c][at.row + 8 * r], tile.x[c][at.row + 8 * r + 1]};
      const bool taken[2] = {IsTaken(x[0], taken_from), IsTaken(x[1], taken_from)};
      // Mostly a column is an outlier in all rows, or in one.
      if (simt::Ballot(taken[0] || taken[1]) == 0) continue;
      TREADLE_UNROLL
      for (int j = 0; j < 2; ++j) {
        if (!taken[j]) continue;
        TREADLE_UNROLL
        for (int i = 0; i < 4 * kWarpGroups; ++i) {
          int32_t& sum = ResultOf(sums, i / 4, i % 4, r, j);
          const float y = simt::AsFloat(static_cast<uint32_t>(sum));
          sum = static_cast<int32_t>(simt::AsBits(simt::Fma(weights[i / 4][i % 4], x[j], y)));
        }
      }
    }
  }
}

// y + bias, then + out, of four features, to out.
TREADLE_DEVICE void StoreFour(const Int8Segment& segment, int feature, float (&y)[4], float* out) {
  const bool whole =
      feature + 4 <= segment.n && (reinterpret_cast<uintptr_t>(out + feature) & 15) == 0;
  if (segment.bias != nullptr) {
    TREADLE_UNROLL
    for (int i = 0; i < 4; ++i) y[i] += feature + i < segment.n ? segment.bias[feature + i] : 0;
  }
  if (whole) {
    auto& words = *reinterpret_cast<simt::Words4*>(out + feature);
    if (segment.accumulate != 0) {
      float before[4];
      ToFloats(words, before);
      TREADLE_UNROLL
      for (int i = 0; i < 4; ++i) y[i] += before[i];
    }
    words = {simt::AsBits(y[0]), simt::AsBits(y[1]), simt::AsBits(y[2]), simt::AsBits(y[3])};
    return;
  }
  TREADLE_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (feature + i >= segment.n) break;
    out[feature + i] = segment.accumulate != 0 ? y[i] + out[feature + i] : y[i];
  }
}

template <int kRows>
TREADLE_DEVICE void StoreTile(const Int8Input& input, const Int8Segment& segment,
                              const TilePlace& place, const LanePlace& at, WarpSums<kRows>& sums) {
  TREADLE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    TREADLE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const int row = place.row0 + at.row + 8 * r + j;
      if (row >= input.rows) continue;
      float* const out = segment.out + row * segment.out_stride;
      TREADLE_UNROLL
      for (int q = 0; q < kWarpGroups; ++q) {
        float y[4];
        TREADLE_UNROLL
        for (int i = 0; i < 4; ++i) {
          y[i] = simt::AsFloat(static_cast<uint32_t>(ResultOf(sums, q, i, r, j)));
        }
        StoreFour(segment, place.feature0 + at.feature + q * kInt8GroupFeatures, y, out);
      }
    }
  }
}

}  // namespace treadle::cuda
