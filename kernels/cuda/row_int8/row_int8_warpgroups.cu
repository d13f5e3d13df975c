// LLM.int8() of many rows on warpgroups (warpgroup_int8.h): blocks of 192 features x 256 rows, one
// on a multiprocessor.
//
// Three warpgroups, each of 64 features x 256 rows: 128 sums of a lane. Weights, which only one
// warp of the block uses, go from memory to the registers that the products take them from, two
// steps of 32 columns ahead: at 384 cycles of matrix unit for a step of all three, or 512 where L2
// is what they wait for, that covers a load's way from L2 and mostly from memory. Activations come
// in through a ring of asynchronous copies for all warps. Each warpgroup has one product on its way
// while it waits for the one before, so that the matrix unit does not run dry at the barriers.
//
// The compiler keeps 24 registers of a thread's 168 free of products' operands, and two for itself:
// 128 sums and three steps' weights are all that fits.
#include "base/status.h"
#include "kernels/cuda/row_int8/row_int8_results.h"
#include "kernels/cuda/row_int8/warpgroup_int8.h"

namespace treadle::cuda {
namespace {

constexpr int kThreads = 3 * simt::kWarpgroup;
constexpr int kFeatures = kInt8WarpgroupFeatures;
constexpr int kBlockRows = kInt8WarpgroupRows;
constexpr int kWarps = kThreads / simt::kWarp;
constexpr int kWarpFeatures = 16;
static_assert(kFeatures == kWarps * kWarpFeatures);
constexpr int kRowTiles = kBlockRows / kInt8TileRows;
using Sums = LaneSums<1, kRowTiles>;
using Tile = OutlierTile<kFeatures, kBlockRows>;

constexpr int kUnitBytes = kBlockRows * kInt8Unit;  // of activations
static_assert(kInt8PieceBytes == simt::kBytePiece);
constexpr int kStages = 6;
// Units whose copies are on their way. The other two stages are those of the unit at hand and of
// the one before it, whose last product may be on its way behind the barrier.
constexpr int kAhead = kStages - 2;
// Steps of 32 columns whose weights a lane has: one whose product is on its way, and two after it.
constexpr int kSteps = 3;
// Units in which each of them has its turn.
constexpr int kRound = 3;
static_assert(2 * kRound % kSteps == 0);

// Shared memory: ring, outliers' tile, flags.
constexpr size_t kTileAt = size_t{kStages} * kUnitBytes;
size_t SharedBytes(int64_t k) { return kTileAt + sizeof(Tile) + size_t{4} * Int8FlagWords(k); }

class WarpgroupTile {
 public:
  TREADLE_DEVICE WarpgroupTile(const Int8Input& input, const Int8Segment& segment,
                               const TilePlace& place, const TileShare& share, uint8_t* ring)
      : ring_(ring), units_(input.units), left_(share.end - share.begin) {
    // Rows g and g + 8 of a warp's A are the g-th pair of its 16 features, which lie side by side.
    // So it has half the lanes' bytes of both of a group's tiles.
    const int lane = simt::Lane();
    const int half = simt::Warp() % 2;
    const int groups = (segment.n + kInt8GroupFeatures - 1) / kInt8GroupFeatures;
    int group = (place.feature0 + simt::Warp() * kWarpFeatures) / kInt8GroupFeatures;
    if (group >= groups) group = groups - 1;  // nobody looks at the results
    weights_ = segment.codes + (group * int64_t{units_} + share.begin) * kInt8WeightUnitBytes +
               lane / 4 % 2 * 1024 + ((lane / 8 + 4 * half) * 4 + lane % 4) * 16;
    const int first = place.row0 / kInt8TileRows + simt::Warp();
    rows_ = input.codes + (first * int64_t{units_} + share.begin) * kInt8RowUnitBytes + lane * 16;
  }

  // The first copies.
  TREADLE_DEVICE void FillRing() {
    TREADLE_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (i < left_) Copy(i);
      simt::CopyAsyncCommit();
    }
  }

  // sums: zeros at first.
  TREADLE_DEVICE void Multiply(Sums& sums) {
    uint32_t weights[kSteps][4] = {};
    AwaitCopies();
    TREADLE_UNROLL
    for (int s = 0; s < kSteps - 1; ++s) Load(s, left_ > s / 2, weights[s]);
    int use = 0;
    for (; left_ > 0; left_ -= kRound) {
      MultiplyUnit<0>(use, weights, sums);
      if (left_ > 1) MultiplyUnit<1>(use, weights, sums);
      if (left_ > 2) MultiplyUnit<2>(use, weights, sums);
    }
    simt::WarpgroupWait<0>();
    simt::Pin(sums[0]);
  }

  TREADLE_DEVICE static LanePlace LanePlaceHere() {
    return {simt::Warp() * kWarpFeatures + simt::Lane() / 4 * 2, simt::Lane() % 4 * 2};
  }

 private:
  // kUnit: its place in the round. use: its stage.
  template <int kUnit>
  TREADLE_DEVICE void MultiplyUnit(int& use, uint32_t (&weights)[kSteps][4], Sums& sums) {
    simt::SyncThreads();
    if (left_ > kUnit + kAhead) Copy(use < 2 ? use + kAhead : use - 2);
    simt::CopyAsyncCommit();
    const simt::SharedMatrix rows =
        simt::ByteMatrixAt(ring_ + use * kUnitBytes, kInt8PieceBytes, kInt8RowUnitBytes);
    TREADLE_UNROLL
    for (int step = 0; step < 2; ++step) {
      constexpr int kFirst = 2 * kUnit;
      uint32_t(&now)[4] = weights[(kFirst + step) % kSteps];
      uint32_t(&before)[4] = weights[(kFirst + step + kSteps - 1) % kSteps];
      simt::Pin(now);
      simt::Pin(sums[0]);
      simt::WarpgroupFence();
      simt::WarpgroupMmaS8(sums[0], now, simt::Advance(rows, step * 2 * kInt8PieceBytes));
      simt::WarpgroupCommit();
      simt::WarpgroupWait<1>();
      simt::Pin(before);
      if (step == 1) AwaitCopies();
      Load(step + kSteps - 1, left_ > kUnit + (step + kSteps - 1) / 2, before);
    }
    use = use + 1 == kStages ? 0 : use + 1;
    weights_ += kInt8WeightUnitBytes;
  }
  // Awaits the next unit; a barrier after it. The fence may wait for loads issued before it:
  // so it stands where only those of the next product are on their way.
  TREADLE_DEVICE static void AwaitCopies() {
    simt::CopyAsyncWait<kAhead - 1>();
    simt::AsyncFence();
  }
  // The next unit of rows. A warp copies every kWarps-th tile of 8 rows; those beyond the last row
  // are there as well (Int8Scratch).
  TREADLE_DEVICE void Copy(int stage) {
    uint8_t* const to = ring_ + stage * kUnitBytes + simt::Thread() * 16;
    const int64_t step = int64_t{units_} * (kWarps * kInt8RowUnitBytes);
    simt::CopyAsync16(to, rows_);
    simt::CopyAsync16(to + kThreads * 16, rows_ + step);
    static_assert(kUnitBytes / 16 > 2 * kThreads && kUnitBytes / 16 <= 3 * kThreads);
    if (simt::Thread() < kUnitBytes / 16 - 2 * kThreads) {
      simt::CopyAsync16(to + 2 * kThreads * 16, rows_ + 2 * step);
    }
    rows_ += kInt8RowUnitBytes;
  }
  // Weights of step `step` from the next unit on, if there are any.
  TREADLE_DEVICE void Load(int step, bool valid, uint32_t (&weights)[4]) const {
    simt::LoadOnce16If(
        valid, weights_ + step / 2 * kInt8WeightUnitBytes + step % 2 * (kInt8WeightUnitBytes / 4),
        weights);
  }

  uint8_t* const ring_;
  const int units_;
  int left_;                // units from the round on
  const uint8_t* weights_;  // this lane's of the unit that comes next
  const uint8_t* rows_;     // the first that this thread copies next
};

using Work = BlockWork<kFeatures, kBlockRows>;

TREADLE_KERNEL(kThreads, 1) void WarpgroupsKernel(Int8Product p) {
  simt::AwaitEarlierLaunches();
  auto* const ring = simt::DynamicShared<uint8_t>();
  auto& tile = *reinterpret_cast<Tile*>(ring + kTileAt);
  auto* const flags = reinterpret_cast<uint32_t*>(&tile + 1);
  Sums sums = {};
  {
    const Work work(p, simt::BlockX());
    WarpgroupTile products(p.input, work.segment, work.place, work.share, ring);
    products.FillRing();
    BeginTile(p.input, work.segment, work.place, flags, tile);
    products.Multiply(sums);
  }
  int zero = 0;
  simt::Pin(zero);  // what follows from it is computed anew: registers are few till here
  const Work work(p, simt::BlockX() + zero);
  if (work.share.splits > 1 &&
      !GatherSums(p, work.share, reinterpret_cast<uint32_t*>(ring), sums)) {
    return;
  }
  FinishTile(p.input, work.segment, work.place, WarpgroupTile::LanePlaceHere(), flags, tile, sums);
}

}  // namespace

bool Int8WarpgroupsFit(const DeviceProperties& machine, int64_t k) {
  return machine.warpgroup_matrices && SharedBytes(k) <= machine.shared_bytes_per_block;
}

void LaunchInt8Warpgroups(Device& device, const Int8Product& product, uint32_t blocks) {
  device.Launch(
      WarpgroupsKernel,
      {.grid_x = blocks, .threads = kThreads, .shared_bytes = SharedBytes(product.input.k)},
      product);
}

}  // namespace treadle::cuda
