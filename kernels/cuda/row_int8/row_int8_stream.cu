// LLM.int8() of few rows: weights stream through once, at the speed of memory.
//
// A block computes a tile of 32 features x 8 kRows rows over all of k. Its first kParts warps share
// the units of k; their integer sums meet in shared memory at the end, exactly. Each warp copies
// the very bytes that it will use, asynchronously, into a ring of its own in shared memory, so the
// loop has no barrier of the block, and what is on its way stays nearly constant. One more warp
// finds the tile's outlier columns and gathers their weights meanwhile, so that they cost the
// others nothing but their multiplications.
//
// One row is quantized by each block for itself, while its ring fills: that reads 4 k bytes more
// for every 32 k of weights, from L2, and saves a launch.
//
// The ring is filled with weights before earlier launches are done; codes of rows follow through
// registers, as in dense_stream.cu.
#include "base/status.h"
#include "kernels/cuda/row_int8/row_int8_outliers.h"

namespace treadle::cuda {
namespace {

using simt::Words4;

constexpr int kParts = 8;
constexpr int kThreads = (kParts + 1) * simt::kWarp;
constexpr int kTiles = 2;  // of the matrix instructions, side by side
constexpr int kFeatures = kInt8GroupFeatures;
constexpr int kSumThreads = 256;

template <int kRows, bool kFused>
struct Stream {
  // 16-byte words of a lane in one stage: a unit of the weights, and of each tile of rows.
  static constexpr int kWords = 2 * kTiles + (kFused ? 0 : kRows);
  static constexpr int kStages = kFused ? 5 : kRows == 1 ? 4 : 3;
  static constexpr int kRingWords = kStages * kWords * simt::kWarp;  // of a warp
  // Words between two rows of a part's sums: at most two lanes of a warp write to one bank.
  static constexpr int kSumStride = kFeatures + 1;
  static constexpr int kResults = 8 * kRows * kFeatures / kSumThreads;  // of a thread
  static_assert(kResults * kSumThreads == 8 * kRows * kFeatures);
  static_assert(8 * kRows * kSumStride * 4 <= kRingWords * 16);
  using Tile = OutlierTile<kFeatures, 8 * kRows>;

  // Shared memory: rings, tile, codes of the row (fused), flags.
  static constexpr size_t kTileAt = size_t{kParts} * kRingWords * sizeof(Words4);
  static constexpr size_t kCodesAt = kTileAt + (sizeof(Tile) + 15) / 16 * 16;
  static size_t SharedBytes(int64_t k) {
    const int64_t codes = kFused ? Int8Units(k) * kInt8Unit : 0;
    return kCodesAt + static_cast<size_t>(codes) + size_t{4} * Int8FlagWords(k);
  }
};

// This lane's bytes of unit 0; units follow each other.
template <int kRows, bool kFused>
struct Sources {
  const uint8_t* weights;
  const uint8_t* x[kRows];
  bool x_valid[kRows];

  TREADLE_DEVICE Sources(const Int8Product& p, const Int8Segment& segment, const TilePlace& place) {
    const int lane = simt::Lane();
    const int64_t units = p.input.units;
    weights = segment.codes + lane * 16 +
              place.feature0 / kInt8GroupFeatures * units * kInt8WeightUnitBytes;
    TREADLE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      x_valid[r] = 8 * r + lane % 8 < p.input.rows;
      x[r] = p.input.codes + (x_valid[r] ? r * units * kInt8RowUnitBytes + lane * 16 : 0);
    }
  }

  TREADLE_DEVICE void CopyWeights(int unit, Words4* slot) const {
    const uint8_t* const from = weights + int64_t{unit} * kInt8WeightUnitBytes;
    TREADLE_UNROLL
    for (int i = 0; i < 2 * kTiles; ++i) {
      simt::CopyAsync16(slot + i * simt::kWarp, from + 512 * i);
    }
  }
  TREADLE_DEVICE void CopyRows(int unit, Words4* slot) const {
    TREADLE_UNROLL
    for (int r = 0; r < (kFused ? 0 : kRows); ++r) {
      const int64_t at = x_valid[r] ? int64_t{unit} * kInt8RowUnitBytes : 0;
      simt::CopyAsync16(slot + (2 * kTiles + r) * simt::kWarp, x[r] + at, x_valid[r]);
    }
  }
  // The same of the stages from `begin` on, which are there when it returns.
  template <int kStages>
  TREADLE_DEVICE void LoadRows(int begin, int end, Words4* ring) const {
    if constexpr (!kFused) {
      constexpr int kStage = Stream<kRows, kFused>::kWords * simt::kWarp;
      Words4 words[kStages][kRows] = {};
      TREADLE_UNROLL
      for (int i = 0; i < kStages; ++i) {
        TREADLE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          if (begin + i >= end || !x_valid[r]) continue;
          const uint8_t* from = x[r] + int64_t{begin + i} * kInt8RowUnitBytes;
          words[i][r] = *reinterpret_cast<const Words4*>(from);
        }
      }
      TREADLE_UNROLL
      for (int i = 0; i < kStages; ++i) {
        TREADLE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          ring[i * kStage + (2 * kTiles + r) * simt::kWarp] = words[i][r];
        }
      }
    }
  }
};

// One unit. slot: this lane's words of it. row_codes: fused: its 16 bytes, if it holds the row.
template <int kRows, bool kFused>
TREADLE_DEVICE void MultiplyUnit(const Words4* slot, const uint8_t* row_codes,
                                 int32_t (&sums)[kTiles][kRows][4]) {
  Words4 x[kRows];
  if constexpr (kFused) {
    x[0] = {0, 0, 0, 0};
    if (simt::Lane() < 4) x[0] = *reinterpret_cast<const Words4*>(row_codes);
  } else {
    TREADLE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      uint32_t b[4];
      simt::LoadMatrix4(b, slot + (2 * kTiles + r) * simt::kWarp);
      x[r] = {b[0], b[1], b[2], b[3]};
    }
  }
  TREADLE_UNROLL
  for (int f = 0; f < kTiles; ++f) {
    TREADLE_UNROLL
    for (int step = 0; step < 2; ++step) {
      const Words4 w = slot[(2 * f + step) * simt::kWarp];
      const uint32_t a[4] = {w.x, w.y, w.z, w.w};
      TREADLE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const uint32_t b[2] = {step == 0 ? x[r].x : x[r].z, step == 0 ? x[r].y : x[r].w};
        simt::MmaS8(sums[f][r], a, b);
      }
    }
  }
}

// Codes of the one row to shared memory, [units, 4 lanes, 16 bytes]; its outliers to flags.
template <typename Tile>
TREADLE_DEVICE void QuantizeHere(const Int8Input& input, Tile& tile, uint8_t* codes,
                                 uint32_t* flags) {
  if (simt::Thread() == 0) tile.absmax_bits = 0;
  for (int i = simt::Thread(); i < Int8FlagWords(input.k); i += kThreads) flags[i] = 0;
  simt::SyncThreads();
  const uint32_t largest =
      simt::WarpMax(ScanRow(input, input.x, [&](int column) { MarkColumn(flags, column); }));
  if (simt::Lane() == 0) simt::AtomicMax(&tile.absmax_bits, largest);
  simt::SyncThreads();
  const Int8RowScale scale = RowScaleOf(tile.absmax_bits);
  if (simt::Thread() == 0) tile.row_scales[0] = scale.scale;
  EncodeRow(input, input.x, scale.inverse, [&](int column, uint32_t word) {
    const int at = column / kInt8Unit * kInt8Unit + column % 16 * 4 + column % kInt8Unit / 16 * 4;
    *reinterpret_cast<uint32_t*>(codes + at) = word;
  });
  simt::SyncThreads();
}

// The first chunk of outliers. One warp.
template <bool kFused, typename Tile>
TREADLE_DEVICE void FirstChunk(const Int8Input& input, const Int8Segment& segment,
                               const TilePlace& place, uint32_t* flags, Tile& tile) {
  const int lane = simt::Lane();
  if (lane == 0) tile.word = 0;
  if constexpr (!kFused) {
    InitFlags(input, lane, simt::kWarp, flags);
    simt::SyncWarp();
    MarkRows(input, 0, input.rows, flags);
  }
  simt::SyncWarp();
  FindColumns(flags, Int8FlagWords(input.k), tile.columns, tile.count, tile.word);
  simt::SyncWarp();
  GatherChunk(input, segment, place, lane, simt::kWarp, tile);
}

// The units of k of warp `part`, its sums to shared memory in place of its ring.
template <int kRows, bool kFused>
TREADLE_DEVICE void MultiplyPart(const Sources<kRows, kFused>& sources, int begin, int end,
                                 const uint8_t* row_codes, Words4* ring) {
  using S = Stream<kRows, kFused>;
  constexpr int kStage = S::kWords * simt::kWarp;
  const int lane = simt::Lane();
  int32_t sums[kTiles][kRows][4] = {};
  int use = 0;
  int fill = S::kStages - 1;
  for (int unit = begin; unit < end; ++unit) {
    simt::CopyAsyncWait<S::kStages - 2>();
    simt::SyncWarp();  // other lanes' rows are there, and the slot before this one is used up
    const int ahead = unit + S::kStages - 1;
    if (ahead < end) {
      sources.CopyWeights(ahead, ring + lane + fill * kStage);
      sources.CopyRows(ahead, ring + lane + fill * kStage);
    }
    simt::CopyAsyncCommit();
    MultiplyUnit<kRows, kFused>(ring + lane + use * kStage,
                                row_codes + unit * kInt8Unit + lane % 4 * 16, sums);
    use = use + 1 == S::kStages ? 0 : use + 1;
    fill = fill + 1 == S::kStages ? 0 : fill + 1;
  }
  simt::SyncWarp();  // the ring is used up
  auto* out = reinterpret_cast<int32_t*>(ring);
  TREADLE_UNROLL
  for (int f = 0; f < kTiles; ++f) {
    TREADLE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      TREADLE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * r + lane % 4 * 2 + i % 2;
        out[row * S::kSumStride + lane / 4 * 4 + 2 * f + i / 2] = sums[f][r][i];
      }
    }
  }
}

// From the parts' sums to results.
template <int kRows, bool kFused>
TREADLE_DEVICE void FinishTile(const Int8Product& p, const Int8Segment& segment,
                               const TilePlace& place, const Words4* rings, uint32_t* flags,
                               typename Stream<kRows, kFused>::Tile& tile) {
  using S = Stream<kRows, kFused>;
  constexpr int kRowStep = kSumThreads / kFeatures;
  const int f = simt::Thread() % kFeatures;
  const int row0 = simt::Thread() / kFeatures;
  const int feature = place.feature0 + f;
  const bool valid = simt::Thread() < kSumThreads && feature < segment.n;
  float y[S::kResults] = {};
  TREADLE_UNROLL
  for (int j = 0; j < S::kResults; ++j) {
    const int row = row0 + j * kRowStep;
    if (!valid || row >= p.input.rows) continue;
    int32_t sum = 0;
    TREADLE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      const auto* sums = reinterpret_cast<const int32_t*>(rings + part * S::kRingWords);
      sum += sums[row * S::kSumStride + f];
    }
    const float row_scale = kFused ? tile.row_scales[0] : p.input.row_info[row].scale;
    y[j] = static_cast<float>(sum) * (segment.scales[feature] * row_scale);
  }
  const uint32_t taken_from = TakenFrom(p.input);
  for (;;) {
    const int count = tile.count;
    if (valid) {
      for (int c = 0; c < count; ++c) {
        const float weight = tile.weights[c][f];
        TREADLE_UNROLL
        for (int j = 0; j < S::kResults; ++j) {
          const int row = row0 + j * kRowStep;
          if (row >= 8 * kRows) continue;
          const float x = tile.x[c][row];
          if (IsTaken(x, taken_from)) y[j] = simt::Fma(weight, x, y[j]);
        }
      }
    }
    if (count < kOutlierChunk) break;
    NextChunk(p.input, segment, place, flags, tile);
  }
  TREADLE_UNROLL
  for (int j = 0; j < S::kResults; ++j) {
    const int row = row0 + j * kRowStep;
    if (!valid || row >= p.input.rows) continue;
    StoreResult(segment, row, feature, y[j]);
  }
}

template <int kRows, bool kFused>
TREADLE_KERNEL(kThreads)
void StreamKernel(Int8Product p) {
  using S = Stream<kRows, kFused>;
  auto* shared = simt::DynamicShared<uint8_t>();
  auto& tile = *reinterpret_cast<typename S::Tile*>(shared + S::kTileAt);
  uint8_t* const row_codes = shared + S::kCodesAt;
  auto* flags = reinterpret_cast<uint32_t*>(row_codes + (kFused ? p.input.units * kInt8Unit : 0));
  auto* rings = reinterpret_cast<Words4*>(shared);

  const Int8Segment segment = SegmentOf(p, simt::BlockX());
  const TilePlace place = {(simt::BlockX() - segment.first_tile) * kFeatures, 0};
  const int warp = simt::Warp();
  const int begin = static_cast<int>(int64_t{p.input.units} * warp / kParts);
  const int end = static_cast<int>(int64_t{p.input.units} * (warp + 1) / kParts);
  const Sources<kRows, kFused> sources(p, segment, place);
  Words4* const ring = rings + warp * S::kRingWords;
  if (warp < kParts) {
    TREADLE_UNROLL
    for (int i = 0; i < S::kStages - 1; ++i) {
      if (begin + i < end) {
        sources.CopyWeights(begin + i, ring + simt::Lane() + i * S::kWords * simt::kWarp);
      }
      simt::CopyAsyncCommit();
    }
  }
  simt::AwaitEarlierLaunches();
  if constexpr (kFused) QuantizeHere(p.input, tile, row_codes, flags);
  if (warp < kParts) {
    sources.template LoadRows<S::kStages - 1>(begin, end, ring + simt::Lane());
    MultiplyPart<kRows, kFused>(sources, begin, end, row_codes, ring);
  } else {
    FirstChunk<kFused>(p.input, segment, place, flags, tile);
  }
  simt::SyncThreads();
  FinishTile<kRows, kFused>(p, segment, place, rings, flags, tile);
}

struct Variant {
  int rows = 0;  // at most
  void (*kernel)(Int8Product) = nullptr;
  size_t (*shared_bytes)(int64_t k) = nullptr;
};
template <int kRows, bool kFused>
constexpr Variant MakeVariant(int rows) {
  return {rows, StreamKernel<kRows, kFused>, Stream<kRows, kFused>::SharedBytes};
}
const Variant kFusedVariant = MakeVariant<1, true>(1);
const Variant kVariants[] = {MakeVariant<1, false>(8), MakeVariant<2, false>(kInt8StreamRows)};

}  // namespace

bool Int8StreamQuantizes(const Device& device, int64_t rows, int64_t k) {
  return rows == 1 && kFusedVariant.shared_bytes(k) <= device.properties().shared_bytes_per_block;
}

void LaunchInt8Stream(Device& device, Int8Product product) {
  const int64_t rows = product.input.rows;
  TREADLE_CHECK(rows >= 1 && rows <= kInt8StreamRows);
  const bool fused = Int8StreamQuantizes(device, rows, product.input.k);
  if (fused) product.input.of_call = 0;  // of one row, both rules are the same
  const Variant& variant = fused ? kFusedVariant : kVariants[rows <= kVariants[0].rows ? 0 : 1];
  const int32_t tiles = NumberTiles(product, kFeatures);
  device.Launch(variant.kernel,
                {.grid_x = static_cast<uint32_t>(tiles),
                 .threads = kThreads,
                 .shared_bytes = variant.shared_bytes(product.input.k)},
                product);
}

}  // namespace treadle::cuda
