// Blocks that share a tile's units of k (Int8TilesPlan). All leave their sums, which are integers
// and exact, in memory, and the one that comes last adds them up. Device code.
#pragma once

#include "kernels/cuda/row_int8/row_int8_results.h"

namespace treadle::cuda {

// What a block computes: units [begin, end) of a tile; part `split` of `splits`.
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
