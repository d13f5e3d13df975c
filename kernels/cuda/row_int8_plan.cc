#include <cstdint>

#include "kernels/cuda/row_int8_kernels.h"

namespace treadle::cuda {
namespace {

// Predicted, not measured: cycles of an H100's or H200's multiprocessor.
//
// Of one unit of a tile of so many rows: up to 64 rows its 8 KB of weights, at a multiprocessor's
// share of 4.2 TB/s; for 128 what shared memory moves (eight warps' 12 loads of 512 bytes and the
// copies, at 128 bytes a cycle); for 256 the matrix instructions (512 of 1.6 cycles, and 5 %).
struct TileCost {
  int rows;
  int cycles;
};
constexpr TileCost kTileCosts[] = {{32, 450}, {64, 450}, {128, 512}, {256, 880}};
// Of a split: what its last block waits for, and what L2 moves in a cycle for all.
constexpr int64_t kSplitCycles = 1500;
constexpr int64_t kL2BytesPerCycle = 3400;

constexpr int kMostSplits = 16;
constexpr int64_t kSmallestSplit = 4;  // units
// Rows of all blocks that share tiles, for each multiprocessor: bounds their sums' memory.
constexpr int64_t kSplitRows = 256;

int64_t RoundUpDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

Int8TilesPlan ChooseInt8Tiles(int64_t rows, int64_t feature_tiles, int64_t units,
                              int multiprocessors, int most_rows) {
  Int8TilesPlan best;
  int64_t best_cycles = INT64_MAX;
  for (const TileCost& cost : kTileCosts) {
    if (cost.rows > most_rows) break;
    const int64_t tiles = RoundUpDivide(rows, cost.rows) * feature_tiles;
    for (int splits = 1; splits <= kMostSplits; splits *= 2) {
      const int64_t blocks = tiles * splits;
      const bool fits = blocks * cost.rows <= kSplitRows * multiprocessors;
      if (splits > 1 && (!fits || units < splits * kSmallestSplit)) break;
      int64_t cycles =
          RoundUpDivide(blocks, multiprocessors) * RoundUpDivide(units, splits) * cost.cycles;
      if (splits > 1) {
        const int64_t sum_bytes = blocks * cost.rows * kInt8BlockFeatures * 4;  // written and read
        cycles += kSplitCycles + 2 * sum_bytes / kL2BytesPerCycle;
      }
      if (cycles >= best_cycles) continue;
      best_cycles = cycles;
      best = {cost.rows, splits};
    }
  }
  return best;
}

size_t Int8SumBytes(int multiprocessors) {
  return static_cast<size_t>(kSplitRows * multiprocessors * kInt8BlockFeatures) * sizeof(int32_t);
}

int Int8Arrivals(int multiprocessors) {
  // Tiles of the fewest rows, each shared by two blocks.
  return static_cast<int>(kSplitRows * multiprocessors / kTileCosts[0].rows / 2);
}

}  // namespace treadle::cuda
