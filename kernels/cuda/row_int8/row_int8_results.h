// From a warp's sums to results: scales, outliers, bias, residual; in the registers that the matrix
// instructions left them in. Device code of row_int8_tiles.cu and row_int8_warpgroups.cu.
#pragma once

#include "kernels/cuda/row_int8/row_int8_outliers.h"

namespace treadle::cuda {

// The sums of a lane: D of kTiles tiles of 16 features x kRows tiles of 8 rows.
template <int kTiles, int kRows>
using LaneSums = int32_t[kTiles][kRows][4];

// Where a lane's results lie in the block's tile: kRun features side by side from feature + 32 q
// on, in rows row + 8 r and the one after it.
struct LanePlace {
  int feature = 0;
  int row = 0;
};
template <int kTiles>
struct LaneFeatures {
  static constexpr int kCount = 2 * kTiles;
  static constexpr int kRun = kCount < 4 ? kCount : 4;
  static_assert(kCount % kRun == 0);

  // From LanePlace::feature on.
  TREADLE_DEVICE static int At(int i) { return i / kRun * kInt8GroupFeatures + i % kRun; }
};
// Feature i of the lane's, row j of two.
template <int kTiles, int kRows>
TREADLE_DEVICE int32_t& ResultOf(LaneSums<kTiles, kRows>& sums, int i, int r, int j) {
  return sums[i / 2][r][i % 2 * 2 + j];
}

// Scales of the tile's rows and the first chunk of outliers. The whole block; a barrier after it.
template <typename Tile>
TREADLE_DEVICE void BeginTile(const Int8Input& input, const Int8Segment& segment,
                              const TilePlace& place, uint32_t* flags, Tile& tile) {
  constexpr int kRows = Tile::kTileRows;
  InitFlags(input, simt::Thread(), simt::Threads(), flags);
  if (simt::Thread() == 0) tile.word = 0;
  for (int i = simt::Thread(); i < kRows; i += simt::Threads()) {
    const int row = place.row0 + i;
    tile.row_scales[i] = row < input.rows ? input.row_info[row].scale : 0.0f;
  }
  simt::SyncThreads();
  const int warps = simt::Threads() / simt::kWarp;
  const int share = (kRows + warps - 1) / warps;
  const int begin = place.row0 + simt::Warp() * share;
  const int end = place.row0 + kRows < input.rows ? place.row0 + kRows : input.rows;
  MarkRows(input, begin, begin + share < end ? begin + share : end, flags);
  NextChunk(input, segment, place, flags, tile);
}

// Sums become products; as bits, they stay in their registers.
template <typename Tile, int kTiles, int kRows>
TREADLE_DEVICE void ScaleSums(const Tile& tile, const Int8Segment& segment, const TilePlace& place,
                              const LanePlace& at, LaneSums<kTiles, kRows>& sums) {
  using Features = LaneFeatures<kTiles>;
  float scales[Features::kCount];
  TREADLE_UNROLL
  for (int i = 0; i < Features::kCount; ++i) {
    const int feature = place.feature0 + at.feature + Features::At(i);
    scales[i] = feature < segment.n ? segment.scales[feature] : 0.0f;
  }
  TREADLE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    TREADLE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const float row_scale = tile.row_scales[at.row + 8 * r + j];
      TREADLE_UNROLL
      for (int i = 0; i < Features::kCount; ++i) {
        int32_t& sum = ResultOf(sums, i, r, j);
        const float y = static_cast<float>(sum) * (scales[i] * row_scale);
        sum = static_cast<int32_t>(simt::AsBits(y));
      }
    }
  }
}

// One chunk of outlier columns onto the results.
template <typename Tile, int kTiles, int kRows>
TREADLE_DEVICE void AddChunk(const Tile& tile, const LanePlace& at, LaneSums<kTiles, kRows>& sums) {
  using Features = LaneFeatures<kTiles>;
  // Mostly a column is an outlier in all rows, or in one: 32 rows are asked for at a time.
  constexpr int kStep = kRows < 4 ? kRows : 4;
  for (int c = 0; c < tile.count; ++c) {
    float weights[Features::kCount / Features::kRun][Features::kRun];
    TREADLE_UNROLL
    for (int q = 0; q < Features::kCount / Features::kRun; ++q) {
      simt::LoadFloats(&tile.weights[c][at.feature + q * kInt8GroupFeatures], weights[q]);
    }
    TREADLE_UNROLL
    for (int r0 = 0; r0 < kRows; r0 += kStep) {
      const int row0 = at.row + 8 * r0;
      const uint32_t word = tile.taken[c][row0 / 32];
      if (word == 0) continue;
      const uint32_t taken = word >> (row0 % 32);
      TREADLE_UNROLL
      for (int r = r0; r < r0 + kStep; ++r) {
        float x[2];
        simt::LoadFloats(&tile.x[c][at.row + 8 * r], x);
        TREADLE_UNROLL
        for (int j = 0; j < 2; ++j) {
          if ((taken & (1u << (8 * (r - r0) + j))) == 0) continue;
          TREADLE_UNROLL
          for (int i = 0; i < Features::kCount; ++i) {
            int32_t& sum = ResultOf(sums, i, r, j);
            const float y = simt::AsFloat(static_cast<uint32_t>(sum));
            const float weight = weights[i / Features::kRun][i % Features::kRun];
            sum = static_cast<int32_t>(simt::AsBits(simt::Fma(weight, x[j], y)));
          }
        }
      }
    }
  }
}

// y, + out where asked, of features side by side, to out.
template <int kRun>
TREADLE_DEVICE void StoreResults(const Int8Segment& segment, int feature, float (&y)[kRun],
                                 float* out) {
  const bool whole = feature + kRun <= segment.n &&
                     (reinterpret_cast<uintptr_t>(out + feature) & (sizeof(y) - 1)) == 0;
  if (whole) {
    if (segment.accumulate != 0) {
      float before[kRun];
      simt::LoadFloats(out + feature, before);
      TREADLE_UNROLL
      for (int i = 0; i < kRun; ++i) y[i] += before[i];
    }
    simt::StoreFloats(y, out + feature);
    return;
  }
  TREADLE_UNROLL
  for (int i = 0; i < kRun; ++i) {
    if (feature + i >= segment.n) break;
    out[feature + i] = segment.accumulate != 0 ? y[i] + out[feature + i] : y[i];
  }
}

template <int kTiles, int kRows>
TREADLE_DEVICE void StoreTile(const Int8Input& input, const Int8Segment& segment,
                              const TilePlace& place, const LanePlace& at,
                              LaneSums<kTiles, kRows>& sums) {
  using Features = LaneFeatures<kTiles>;
  float bias[Features::kCount];
  TREADLE_UNROLL
  for (int i = 0; i < Features::kCount; ++i) {
    const int feature = place.feature0 + at.feature + Features::At(i);
    // Adding -0 changes nothing.
    bias[i] = segment.bias != nullptr && feature < segment.n ? segment.bias[feature] : -0.0f;
  }
  TREADLE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    TREADLE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const int row = place.row0 + at.row + 8 * r + j;
      if (row >= input.rows) continue;
      float* const out = segment.out + row * segment.out_stride;
      TREADLE_UNROLL
      for (int first = 0; first < Features::kCount; first += Features::kRun) {
        float y[Features::kRun];
        TREADLE_UNROLL
        for (int i = 0; i < Features::kRun; ++i) {
          y[i] = simt::AsFloat(static_cast<uint32_t>(ResultOf(sums, first + i, r, j)));
          y[i] += bias[first + i];
        }
        StoreResults(segment, place.feature0 + at.feature + Features::At(first), y, out);
      }
    }
  }
}

// From the block's sums to results. at: of this lane.
template <typename Tile, int kTiles, int kRows>
TREADLE_DEVICE void FinishTile(const Int8Input& input, const Int8Segment& segment,
                               const TilePlace& place, const LanePlace& at, uint32_t* flags,
                               Tile& tile, LaneSums<kTiles, kRows>& sums) {
  ScaleSums(tile, segment, place, at, sums);
  for (;;) {
    const int count = tile.count;
    AddChunk(tile, at, sums);
    if (count < kOutlierChunk) break;
    NextChunk(input, segment, place, flags, tile);
  }
  StoreTile(input, segment, place, at, sums);
}

// -- blocks that share a tile's units of k (Int8TilesPlan) ----------------------------------------
// All leave their sums, which are integers and exact, in memory, and the one that comes last adds
// them up.

// The work of a block: units [begin, end) of a tile; part `split` of `splits`.
struct TileShare {
  int tile = 0;
  int split = 0;
  int splits = 1;
  int begin = 0;
  int end = 0;
};
TREADLE_DEVICE TileShare ShareOf(const Int8Product& p, int block) {
  const int shared = block - p.whole_tiles;
  if (shared < 0) return {.tile = block, .end = p.input.units};
  TileShare share;
  share.tile = p.whole_tiles + shared / p.splits;
  share.split = shared % p.splits;
  share.splits = p.splits;
  share.begin = static_cast<int>(int64_t{p.input.units} * share.split / p.splits);
  share.end = static_cast<int>(int64_t{p.input.units} * (share.split + 1) / p.splits);
  return share;
}

// Which tile of kFeatures x kRows results a block works on.
template <int kFeatures, int kRows>
struct BlockWork {
  TileShare share;
  Int8Segment segment;
  TilePlace place;

  TREADLE_DEVICE BlockWork(const Int8Product& p, int block) : share(ShareOf(p, block)) {
    const int row_tiles = (p.input.rows + kRows - 1) / kRows;
    const int feature_tile = share.tile / row_tiles;
    segment = SegmentOf(p, feature_tile);
    place = {(feature_tile - segment.first_tile) * kFeatures, share.tile % row_tiles * kRows};
  }
};

// Adds the sums of the tile's other blocks, if this one is the last that has its own. False if not.
// last: in shared memory that nobody uses any more once all threads are here.
template <int kTiles, int kRows>
TREADLE_DEVICE bool GatherSums(const Int8Product& p, const TileShare& share, uint32_t* last,
                               LaneSums<kTiles, kRows>& sums) {
  using simt::Words4;
  const int words = kTiles * kRows * simt::Threads();  // of 16 bytes, of a block
  const int shared = share.tile - p.whole_tiles;
  auto* const tile =
      reinterpret_cast<Words4*>(p.sums) + int64_t{shared} * share.splits * words + simt::Thread();
  TREADLE_UNROLL
  for (int i = 0; i < kTiles * kRows; ++i) {
    const auto& four = sums[i / kRows][i % kRows];
    tile[share.split * words + i * simt::Threads()] = {
        static_cast<uint32_t>(four[0]), static_cast<uint32_t>(four[1]),
        static_cast<uint32_t>(four[2]), static_cast<uint32_t>(four[3])};
  }
  simt::Fence();
  simt::SyncThreads();
  if (simt::Thread() == 0) {
    uint32_t& arrivals = p.arrivals[shared];
    *last = simt::AtomicAdd(&arrivals, 1) + 1 == static_cast<uint32_t>(share.splits) ? 1 : 0;
    if (*last != 0) arrivals = 0;  // for the next launch
    simt::Fence();
  }
  simt::SyncThreads();
  if (*last == 0) return false;
  for (int split = 0; split < share.splits; ++split) {
    if (split == share.split) continue;
    TREADLE_UNROLL
    for (int i = 0; i < kTiles * kRows; ++i) {
      const Words4 other = tile[split * words + i * simt::Threads()];
      auto& four = sums[i / kRows][i % kRows];
      four[0] += static_cast<int32_t>(other.x);
      four[1] += static_cast<int32_t>(other.y);
      four[2] += static_cast<int32_t>(other.z);
      four[3] += static_cast<int32_t>(other.w);
    }
  }
  return true;
}

}  // namespace treadle::cuda
