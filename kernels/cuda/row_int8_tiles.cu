// LLM.int8() of more rows: blocks of 128 features x 32, 64, 128 or 256 rows on the tensor cores.
//
// Eight warps, two along features and four along rows; a warp's tile is 64 features x 8 kRows rows.
// Units of k come in through a ring of asynchronous copies that all warps share. Both operands lie
// in the order of the matrix instructions, so a lane loads 16 bytes at a time, without bank
// conflicts: per unit and warp 8 + kRows loads for 8 kRows matrix instructions. With kRows = 8 that
// is 64 cycles of shared memory (and 24 more of copies) for about 105 of matrix instructions.
//
// Tiles of the same features and all rows run side by side, so weights come from memory once and
// the codes of the activations stay in L2.
//
// Where there are too few tiles for the machine, blocks share a tile's units of k. All leave their
// sums, which are integers and exact, in memory, and the one that comes last adds them up. The
// outliers' first chunk is gathered while the ring fills.
#include "kernels/cuda/row_int8_results.h"
#include "kernels/status.h"

namespace treadle::cuda {
namespace {

using simt::Words4;

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

// feature_warp, row_warp: this warp's place in the block.
template <int kRows>
TREADLE_DEVICE void MultiplyUnit(const uint8_t* stage, int feature_warp, int row_warp,
                                 WarpSums<kRows>& sums) {
  const auto* weights =
      reinterpret_cast<const Words4*>(stage + feature_warp * kWarpGroups * kInt8WeightUnitBytes);
  const auto* rows = reinterpret_cast<const Words4*>(stage + TilesShape<kRows>::kWeightBytes +
                                                     row_warp * kRows * kInt8RowUnitBytes);
  const int lane = simt::Lane();
  Words4 x[kRows];
  TREADLE_UNROLL
  for (int r = 0; r < kRows; ++r) x[r] = rows[r * simt::kWarp + lane];
  TREADLE_UNROLL
  for (int step = 0; step < 2; ++step) {
    TREADLE_UNROLL
    for (int f = 0; f < kWarpFeatureTiles; ++f) {
      const Words4 w = weights[(2 * f + step) * simt::kWarp + lane];
      const uint32_t a[4] = {w.x, w.y, w.z, w.w};
      TREADLE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const uint32_t b[2] = {step == 0 ? x[r].x : x[r].z, step == 0 ? x[r].y : x[r].w};
        simt::MmaS8(sums[f][r], a, b);
      }
    }
  }
}

// What a block computes: units [begin, end) of a tile.
struct TileWork {
  TilePlace place;
  int begin = 0;
  int end = 0;
};

// The stage that begins with `unit`.
template <int kRows>
TREADLE_DEVICE void CopyStage(const Int8Input& input, const Int8Segment& segment,
                              const TileWork& work, int unit, uint8_t* stage) {
  using S = TilesShape<kRows>;
  TREADLE_UNROLL
  for (int u = 0; u < S::kStageUnits; ++u) {
    if (unit + u >= work.end) break;
    CopyUnit<kRows>(input, segment, work.place, unit + u, stage + u * S::kUnitBytes);
  }
  simt::CopyAsyncCommit();
}

// The first copies.
template <int kRows>
TREADLE_DEVICE void FillRing(const Int8Input& input, const Int8Segment& segment,
                             const TileWork& work, uint8_t* ring) {
  using S = TilesShape<kRows>;
  TREADLE_UNROLL
  for (int i = 0; i < S::kStages - 1; ++i) {
    CopyStage<kRows>(input, segment, work, work.begin + i * S::kStageUnits,
                     ring + i * S::kStageBytes);
  }
}

template <int kRows>
TREADLE_DEVICE void MultiplyTile(const Int8Input& input, const Int8Segment& segment,
                                 const TileWork& work, uint8_t* ring, WarpSums<kRows>& sums) {
  using S = TilesShape<kRows>;
  const int warp = simt::Warp();
  int use = 0;
  int fill = S::kStages - 1;
  for (int unit = work.begin; unit < work.end; unit += S::kStageUnits) {
    simt::CopyAsyncWait<S::kStages - 2>();
    simt::SyncThreads();  // the stage is there for all, and all have used the one before it
    CopyStage<kRows>(input, segment, work, unit + (S::kStages - 1) * S::kStageUnits,
                     ring + fill * S::kStageBytes);
    TREADLE_UNROLL
    for (int u = 0; u < S::kStageUnits; ++u) {
      if (unit + u >= work.end) break;
      MultiplyUnit<kRows>(ring + use * S::kStageBytes + u * S::kUnitBytes, warp % kFeatureWarps,
                          warp / kFeatureWarps, sums);
    }
    use = use + 1 == S::kStages ? 0 : use + 1;
    fill = fill + 1 == S::kStages ? 0 : fill + 1;
  }
}

// Adds the sums of the tile's other blocks, if this one is the last that has its own. False if not.
// last: in shared memory.
template <int kRows>
TREADLE_DEVICE bool GatherSums(const Int8Product& p, uint32_t* last, WarpSums<kRows>& sums) {
  constexpr int kWords = kWarpFeatureTiles * kRows * kThreads;  // of 16 bytes, of a block
  auto* const tile = reinterpret_cast<Words4*>(p.sums) +
                     static_cast<int64_t>(simt::BlockX()) * p.splits * kWords + simt::Thread();
  TREADLE_UNROLL
  for (int i = 0; i < kWarpFeatureTiles * kRows; ++i) {
    const auto& four = sums[i / kRows][i % kRows];
    tile[simt::BlockY() * kWords + i * kThreads] = {
        static_cast<uint32_t>(four[0]), static_cast<uint32_t>(four[1]),
        static_cast<uint32_t>(four[2]), static_cast<uint32_t>(four[3])};
  }
  simt::Fence();
  simt::SyncThreads();
  if (simt::Thread() == 0) {
    uint32_t& arrivals = p.arrivals[simt::BlockX()];
    *last = simt::AtomicAdd(&arrivals, 1) + 1 == static_cast<uint32_t>(p.splits) ? 1 : 0;
    if (*last != 0) arrivals = 0;  // for the next launch
    simt::Fence();
  }
  simt::SyncThreads();
  if (*last == 0) return false;
  for (int split = 0; split < p.splits; ++split) {
    if (split == simt::BlockY()) continue;
    TREADLE_UNROLL
    for (int i = 0; i < kWarpFeatureTiles * kRows; ++i) {
      const Words4 words = tile[split * kWords + i * kThreads];
      auto& four = sums[i / kRows][i % kRows];
      four[0] += static_cast<int32_t>(words.x);
      four[1] += static_cast<int32_t>(words.y);
      four[2] += static_cast<int32_t>(words.z);
      four[3] += static_cast<int32_t>(words.w);
    }
  }
  return true;
}

// The first chunk of outliers. The whole block; a barrier after it.
template <int kRows>
TREADLE_DEVICE void FirstChunk(const Int8Input& input, const Int8Segment& segment,
                               const TilePlace& place, uint32_t* flags,
                               typename TilesShape<kRows>::Tile& tile) {
  InitFlags(input, simt::Thread(), kThreads, flags);
  if (simt::Thread() == 0) tile.word = 0;
  simt::SyncThreads();
  constexpr int kShare = TilesShape<kRows>::kBlockRows / (kThreads / simt::kWarp);
  const int begin = place.row0 + simt::Warp() * kShare;
  MarkRows(input, begin, begin + kShare < input.rows ? begin + kShare : input.rows, flags);
  NextChunk(input, segment, place, flags, tile);
}

template <int kRows>
TREADLE_KERNEL(kThreads)
void TilesKernel(Int8Product p) {
  simt::AwaitEarlierLaunches();
  using S = TilesShape<kRows>;
  auto* const ring = simt::DynamicShared<uint8_t>();
  auto& tile = *reinterpret_cast<typename S::Tile*>(ring + S::kTileAt);
  auto* const flags = reinterpret_cast<uint32_t*>(&tile + 1);
  const int row_tiles = (p.input.rows + S::kBlockRows - 1) / S::kBlockRows;
  const int feature_tile = simt::BlockX() / row_tiles;
  const Int8Segment segment = Int8SegmentOf(p, feature_tile);
  TileWork work;
  work.place = {(feature_tile - segment.first_tile) * kFeatures,
                simt::BlockX() % row_tiles * S::kBlockRows};
  work.begin = static_cast<int>(int64_t{p.input.units} * simt::BlockY() / p.splits);
  work.end = static_cast<int>(int64_t{p.input.units} * (simt::BlockY() + 1) / p.splits);

  FillRing<kRows>(p.input, segment, work, ring);
  FirstChunk<kRows>(p.input, segment, work.place, flags, tile);
  WarpSums<kRows> sums = {};
  MultiplyTile<kRows>(p.input, segment, work, ring, sums);
  simt::SyncThreads();  // the ring is used up
  if (p.splits > 1 && !GatherSums<kRows>(p, reinterpret_cast<uint32_t*>(ring), sums)) return;

  const LanePlace at = LanePlaceOf<kRows>();
  ScaleSums<kRows>(p.input, segment, work.place, at, sums);
  for (;;) {
    const int count = tile.count;
    AddChunk<kRows>(tile, TakenFrom(p.input), at, sums);
    if (count < kOutlierChunk) break;
    NextChunk(p.input, segment, work.place, flags, tile);
  }
  StoreTile<kRows>(p.input, segment, work.place, at, sums);
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
  const int64_t rows = product.input.rows;
  const int64_t feature_tiles = NumberInt8Tiles(product, kFeatures);
  int most_rows = 0;
  for (const Variant& variant : kVariants) {
    const bool fits = variant.shared_bytes(product.input.k) <= machine.shared_bytes_per_block;
    if (fits) most_rows = variant.rows;
  }
  TREADLE_CHECK(most_rows > 0);
  const Int8TilesPlan plan =
      ChooseInt8Tiles(rows, feature_tiles, product.input.units, machine.multiprocessors, most_rows);
  product.splits = plan.splits;
  for (const Variant& variant : kVariants) {
    if (variant.rows != plan.rows) continue;
    const int64_t row_tiles = (rows + variant.rows - 1) / variant.rows;
    device.Launch(variant.kernel,
                  {.grid_x = static_cast<uint32_t>(row_tiles * feature_tiles),
                   .grid_y = static_cast<uint32_t>(plan.splits),
                   .threads = kThreads,
                   .shared_bytes = variant.shared_bytes(product.input.k)},
                  product);
  }
}

}  // namespace treadle::cuda
