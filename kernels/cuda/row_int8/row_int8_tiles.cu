// LLM.int8() of more rows: blocks of 128 features x 32, 64, 128 or 256 rows on the tensor cores.
//
// Eight warps, two along features and four along rows; a warp's tile is 64 features x 8 kRows rows.
// Units of k come in through a ring of asynchronous copies that all warps share. Both operands lie
// in the order of the matrix instructions, so loads are of 512 bytes in a row, without bank
// conflicts: per unit and warp 8 + kRows loads for 8 kRows matrix instructions. With kRows = 8 that
// is 64 cycles of shared memory (and 24 more of copies) for about 105 of matrix instructions.
//
// Tiles of the same features and all rows run side by side, so weights come from memory once and
// the codes of the activations stay in L2.
//
// The outliers' first chunk is gathered while the ring fills. Many rows on devices with warpgroups
// are for row_int8_warpgroups.cu.
#include "base/status.h"
#include "kernels/cuda/row_int8/row_int8_results.h"

namespace treadle::cuda {
namespace {

using simt::Words4;

// Warps of a block, and what each computes: 64 features x 8 kRows rows.
constexpr int kFeatureWarps = 2;
constexpr int kRowWarps = 4;
constexpr int kWarpGroups = 2;                      // of 32 features
constexpr int kWarpFeatureTiles = 2 * kWarpGroups;  // of the matrix instructions
template <int kRows>
using WarpSums = LaneSums<kWarpFeatureTiles, kRows>;

constexpr int kThreads = kFeatureWarps * kRowWarps * simt::kWarp;
constexpr int kFeatures = kInt8BlockFeatures;
static_assert(kFeatures == kFeatureWarps * kWarpGroups * kInt8GroupFeatures);

template <int kRows>
struct TilesShape {
  static constexpr int kBlockRows = kRowWarps * kRows * kInt8TileRows;
  static constexpr int kWeightBytes = kFeatures * kInt8Unit;  // of a unit
  static constexpr int kUnitBytes = kWeightBytes + kBlockRows * kInt8Unit;
  static constexpr int kWeightPieces = kWeightBytes / 16;  // of copies
  static constexpr int kRowPieces = kBlockRows * kInt8Unit / 16;
  static_assert(kWeightPieces % kThreads == 0);
  // Units between two barriers: the largest tiles have a multiprocessor for themselves, so nobody
  // works while their warps wait for each other.
  static constexpr int kStageUnits = kRows == 8 ? 2 : 1;
  static constexpr int kStageBytes = kStageUnits * kUnitBytes;
  // Small tiles are bound by bytes, and need more of them on their way.
  static constexpr int kStages = kRows == 1 ? 6 : kRows == 2 ? 5 : kRows == 4 ? 4 : 3;
  using Tile = OutlierTile<kFeatures, kBlockRows>;

  // Shared memory: ring, outliers' tile, flags.
  static constexpr size_t kTileAt = size_t{kStages} * kStageBytes;
  static size_t SharedBytes(int64_t k) {
    return kTileAt + sizeof(Tile) + size_t{4} * Int8FlagWords(k);
  }
};

// One unit of the block's operands to shared memory; whole tiles that do not exist are zeros.
template <int kRows>
TREADLE_DEVICE void CopyUnit(const Int8Input& input, const Int8Segment& segment,
                             const TilePlace& place, int unit, uint8_t* stage) {
  using S = TilesShape<kRows>;
  const int64_t units = input.units;
  TREADLE_UNROLL
  for (int i = 0; i * kThreads < S::kWeightPieces; ++i) {
    const int piece = simt::Thread() + i * kThreads;  // 128 of a group's unit
    const int64_t group = place.feature0 / kInt8GroupFeatures + piece / 128;
    const bool valid = group * kInt8GroupFeatures < segment.n;
    const int64_t at = (group * units + unit) * kInt8WeightUnitBytes + piece % 128 * 16;
    simt::CopyAsync16(stage + piece * 16, segment.codes + (valid ? at : 0), valid);
  }
  TREADLE_UNROLL
  for (int i = 0; i * kThreads < S::kRowPieces; ++i) {
    const int piece = simt::Thread() + i * kThreads;  // 32 of a tile's unit
    if (piece >= S::kRowPieces) break;
    const int64_t tile = place.row0 / kInt8TileRows + piece / 32;
    const bool valid = tile * kInt8TileRows < input.rows;
    const int64_t at = (tile * units + unit) * kInt8RowUnitBytes + piece % 32 * 16;
    simt::CopyAsync16(stage + S::kWeightBytes + piece * 16, input.codes + (valid ? at : 0), valid);
  }
}

template <int kRows>
TREADLE_DEVICE LanePlace LanePlaceOf() {
  const int warp = simt::Warp();
  const int lane = simt::Lane();
  return {warp % kFeatureWarps * kWarpGroups * kInt8GroupFeatures + lane / 4 * 4,
          warp / kFeatureWarps * kRows * kInt8TileRows + lane % 4 * 2};
}

// feature_warp, row_warp: this warp's place in the block.
template <int kRows>
TREADLE_DEVICE void MultiplyUnit(const uint8_t* stage, int feature_warp, int row_warp,
                                 WarpSums<kRows>& sums) {
  const auto* weights =
      reinterpret_cast<const Words4*>(stage + feature_warp * kWarpGroups * kInt8WeightUnitBytes);
  const int lane = simt::Lane();
  const uint8_t* rows =
      stage + TilesShape<kRows>::kWeightBytes + row_warp * kRows * kInt8RowUnitBytes + lane * 16;
  uint32_t x[kRows][4];
  TREADLE_UNROLL
  for (int r = 0; r < kRows; ++r) simt::LoadMatrix4(x[r], rows + r * kInt8RowUnitBytes);
  TREADLE_UNROLL
  for (int step = 0; step < 2; ++step) {
    TREADLE_UNROLL
    for (int f = 0; f < kWarpFeatureTiles; ++f) {
      const Words4 w = weights[(2 * f + step) * simt::kWarp + lane];
      const uint32_t a[4] = {w.x, w.y, w.z, w.w};
      TREADLE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const uint32_t b[2] = {x[r][2 * step], x[r][2 * step + 1]};
        simt::MmaS8(sums[f][r], a, b);
      }
    }
  }
}

// The stage that begins with `unit`.
template <int kRows>
TREADLE_DEVICE void CopyStage(const Int8Input& input, const Int8Segment& segment,
                              const TilePlace& place, const TileShare& share, int unit,
                              uint8_t* stage) {
  using S = TilesShape<kRows>;
  TREADLE_UNROLL
  for (int u = 0; u < S::kStageUnits; ++u) {
    if (unit + u >= share.end) break;
    CopyUnit<kRows>(input, segment, place, unit + u, stage + u * S::kUnitBytes);
  }
  simt::CopyAsyncCommit();
}

// The first copies.
template <int kRows>
TREADLE_DEVICE void FillRing(const Int8Input& input, const Int8Segment& segment,
                             const TilePlace& place, const TileShare& share, uint8_t* ring) {
  using S = TilesShape<kRows>;
  TREADLE_UNROLL
  for (int i = 0; i < S::kStages - 1; ++i) {
    CopyStage<kRows>(input, segment, place, share, share.begin + i * S::kStageUnits,
                     ring + i * S::kStageBytes);
  }
}

template <int kRows>
TREADLE_DEVICE void MultiplyTile(const Int8Input& input, const Int8Segment& segment,
                                 const TilePlace& place, const TileShare& share, uint8_t* ring,
                                 WarpSums<kRows>& sums) {
  using S = TilesShape<kRows>;
  const int warp = simt::Warp();
  int use = 0;
  int fill = S::kStages - 1;
  for (int unit = share.begin; unit < share.end; unit += S::kStageUnits) {
    simt::CopyAsyncWait<S::kStages - 2>();
    simt::SyncThreads();  // the stage is there for all, and all have used the one before it
    CopyStage<kRows>(input, segment, place, share, unit + (S::kStages - 1) * S::kStageUnits,
                     ring + fill * S::kStageBytes);
    TREADLE_UNROLL
    for (int u = 0; u < S::kStageUnits; ++u) {
      if (unit + u >= share.end) break;
      MultiplyUnit<kRows>(ring + use * S::kStageBytes + u * S::kUnitBytes, warp % kFeatureWarps,
                          warp / kFeatureWarps, sums);
    }
    use = use + 1 == S::kStages ? 0 : use + 1;
    fill = fill + 1 == S::kStages ? 0 : fill + 1;
  }
}

template <int kRows>
TREADLE_KERNEL(kThreads)
void TilesKernel(Int8Product p) {
  simt::AwaitEarlierLaunches();
  using S = TilesShape<kRows>;
  auto* const ring = simt::DynamicShared<uint8_t>();
  auto& tile = *reinterpret_cast<typename S::Tile*>(ring + S::kTileAt);
  auto* const flags = reinterpret_cast<uint32_t*>(&tile + 1);
  const BlockWork<kFeatures, S::kBlockRows> work(p, simt::BlockX());
  const auto& [share, segment, place] = work;

  FillRing<kRows>(p.input, segment, place, share, ring);
  BeginTile(p.input, segment, place, flags, tile);
  WarpSums<kRows> sums = {};
  MultiplyTile<kRows>(p.input, segment, place, share, ring, sums);
  if (share.splits > 1 && !GatherSums(p, share, reinterpret_cast<uint32_t*>(ring), sums)) return;
  FinishTile(p.input, segment, place, LanePlaceOf<kRows>(), flags, tile, sums);
}

struct Variant {
  int rows = 0;  // of a block
  void (*kernel)(Int8Product) = nullptr;
  size_t (*shared_bytes)(int64_t k) = nullptr;
};
template <int kRows>
constexpr Variant MakeVariant() {
  return {TilesShape<kRows>::kBlockRows, TilesKernel<kRows>, TilesShape<kRows>::SharedBytes};
}
const Variant kVariants[] = {MakeVariant<1>(), MakeVariant<2>(), MakeVariant<4>(),
                             MakeVariant<8>()};

}  // namespace

void LaunchInt8Tiles(Device& device, Int8Product product) {
  const DeviceProperties& machine = device.properties();
  Int8TilesShape shape;
  shape.rows = product.input.rows;
  shape.units = product.input.units;
  if (Int8WarpgroupsFit(machine, product.input.k)) {
    shape.warpgroup_tiles = NumberTiles(product, kInt8WarpgroupFeatures);
  }
  shape.feature_tiles = NumberTiles(product, kFeatures);
  int most_rows = 0;
  for (const Variant& variant : kVariants) {
    const bool fits = variant.shared_bytes(product.input.k) <= machine.shared_bytes_per_block;
    if (fits) most_rows = variant.rows;
  }
  TREADLE_CHECK(most_rows > 0);
  const Int8TilesPlan plan = ChooseInt8Tiles(shape, machine.multiprocessors, most_rows);
  NumberTiles(product, plan.features);
  product.whole_tiles = static_cast<int32_t>(plan.whole);
  product.splits = plan.splits;
  const int64_t shared_tiles = Int8Tiles(shape, plan) - plan.whole;
  const auto blocks = static_cast<uint32_t>(plan.whole + shared_tiles * plan.splits);
  if (plan.features == kInt8WarpgroupFeatures) return LaunchInt8Warpgroups(device, product, blocks);
  for (const Variant& variant : kVariants) {
    if (variant.rows != plan.rows) continue;
    device.Launch(variant.kernel,
                  {.grid_x = blocks,
                   .threads = kThreads,
                   .shared_bytes = variant.shared_bytes(product.input.k)},
                  product);
  }
}

}  // namespace treadle::cuda
