#include <cstdint>

#include "kernels/cuda/row_int8/row_int8_kernels.h"

namespace treadle::cuda {
namespace {

// Predicted, not measured: cycles of an H100's or H200's multiprocessor for one unit of a tile.
//
// 128 features on a warp's matrix instructions: up to 64 rows the 8 KB of weights, at a
// multiprocessor's share of 4.2 TB/s; from 128 on the 16 or 24 KB that L2 gives it, at 28 bytes a
// cycle (25 to 31) while all ask. For 128 rows shared memory needs less (512: eight warps' 12 loads
// of 512 bytes and the copies, at 128 bytes a cycle), for 256 the matrix instructions as much (512
// of 1.6 cycles, and 5 %).
// 192 features x 256 rows on warpgroups: L2 again, for 28 KB. The matrix unit needs 768 (six
// products of 128), in which shared memory moves 85 of 128 bytes a cycle: 48 KB that the products
// read and 16 KB of copies.
struct TileCost {
  int features;
  int rows;
  int cycles;
};
constexpr TileCost kTileCosts[] = {{kInt8BlockFeatures, 32, 450},
                                   {kInt8BlockFeatures, 64, 450},
                                   {kInt8BlockFeatures, 128, 585},
                                   {kInt8BlockFeatures, 256, 880},
                                   {kInt8WarpgroupFeatures, kInt8WarpgroupRows, 1024}};
constexpr int kAloneRows = 256;
// Costs of shared tiles: what the last block of one waits for; what L2 takes in a cycle of all
// blocks, and gives the last ones, each on a multiprocessor of its own (384 threads with some five
// loads of 16 bytes on their way).
constexpr int64_t kSplitCycles = 1500;
constexpr int64_t kL2BytesPerCycle = 3400;
constexpr int64_t kGatherBytesPerCycle = 38;

constexpr int kMaxSplits = 16;
constexpr int64_t kSmallestSplit = 4;  // units
// Results of all blocks that share tiles, for each multiprocessor: bounds their sums' memory.
constexpr int64_t kSplitResults = int64_t{kInt8WarpgroupFeatures} * kInt8WarpgroupRows;

int64_t RoundUpDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t Int8Tiles(const Int8TilesShape& shape, const Int8TilesPlan& plan) {
  const bool warpgroups = plan.features == kInt8WarpgroupFeatures;
  return RoundUpDivide(shape.rows, plan.rows) *
         (warpgroups ? shape.warpgroup_tiles : shape.feature_tiles);
}

Int8TilesPlan ChooseInt8Tiles(const Int8TilesShape& shape, int multiprocessors, int most_rows) {
  Int8TilesPlan best;
  int64_t best_cycles = INT64_MAX;
  for (const TileCost& cost : kTileCosts) {
    if (cost.features == kInt8BlockFeatures && cost.rows > most_rows) continue;
    Int8TilesPlan plan = {.features = cost.features, .rows = cost.rows};
    const int64_t tiles = Int8Tiles(shape, plan);
    if (tiles == 0) continue;
    for (plan.splits = 1; plan.splits <= kMaxSplits; ++plan.splits) {
      // Blocks with a multiprocessor for themselves: those that fill all are not shared.
      const int64_t full = cost.rows < kAloneRows ? 0 : tiles / multiprocessors * multiprocessors;
      plan.whole = plan.splits == 1 ? tiles : full;
      const int64_t blocks = (tiles - plan.whole) * plan.splits;
      const int64_t results = blocks * cost.rows * cost.features;
      if (plan.splits > 1 && (blocks == 0 || results > kSplitResults * multiprocessors ||
                              shape.units < plan.splits * kSmallestSplit)) {
        break;
      }
      int64_t units = RoundUpDivide(plan.whole, multiprocessors) * shape.units;
      if (plan.splits > 1) {
        units += RoundUpDivide(blocks, multiprocessors) * RoundUpDivide(shape.units, plan.splits);
      }
      int64_t cycles = units * cost.cycles;
      if (plan.splits > 1) {
        const int64_t others = int64_t{plan.splits - 1} * cost.rows * cost.features;
        cycles += kSplitCycles + results * 4 / kL2BytesPerCycle + others * 4 / kGatherBytesPerCycle;
      }
      if (cycles >= best_cycles) continue;
      best_cycles = cycles;
      best = plan;
    }
  }
  return best;
}

size_t Int8SumBytes(int multiprocessors) {
  return static_cast<size_t>(kSplitResults * multiprocessors) * sizeof(int32_t);
}

int Int8Arrivals(int multiprocessors) {
  // Tiles of the fewest results, each shared by two blocks.
  constexpr int64_t kFewest = int64_t{kTileCosts[0].features} * kTileCosts[0].rows;
  return static_cast<int>(kSplitResults * multiprocessors / kFewest / 2);
}

}  // namespace treadle::cuda
