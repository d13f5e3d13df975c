// Products of few rows: weights stream through once, at the speed of memory.
//
// A block is kDenseParts warps; warp p computes part p of the block's tile, all its rows and
// features, and the parts meet in shared memory at the end: no second launch, no partial sums in
// global memory, one order of sums for every shape.
//
// Each lane copies exactly the bytes that it will use itself, asynchronously, into a ring of its
// own in shared memory. So the loop has no barrier at all, a stage is refilled as soon as it is
// used, and the bytes on their way stay nearly constant: (stages - 1) .. stages times 2 KB per 16
// features of a warp. That is what memory speed takes: 4.8 TB/s times about a microsecond of loaded
// latency is 36 KB for each of 132 multiprocessors. The ring is sized for 64 KB to 128 KB of
// weights on one, so that while the last blocks of a launch run alone, their share of the speed
// grows instead of the total shrinking.
//
// The ring is filled with weights before earlier launches are done, as far as blocks find room
// beside theirs. Its rows follow through registers, not as copies: copies land in the order in
// which they were asked for, so those would come behind the weights of all stages.
#include <algorithm>

#include "base/status.h"
#include "kernels/cuda/dense/dense_fragments.h"

namespace treadle::cuda {
namespace {

using simt::Words4;

constexpr int kThreads = kDenseParts * simt::kWarp;

// 16-byte words of one lane in one stage.
constexpr int WeightWords(int features) { return 4 * features; }
constexpr int kRowWords = 2;
constexpr int StageWords(int features, int rows) {
  return WeightWords(features) + rows * kRowWords;
}
// Floats between two rows of a part's sums: the lanes of a warp then write to different banks.
constexpr int SumStride(int features) { return 16 * features + 4; }

// The bytes that this lane reads: 16 of each of its rows of weights and activations in each half
// step.
template <int kFeatures, int kRows>
struct Sources {
  const uint16_t* weights[2 * kFeatures];
  const uint16_t* x[kRows];
  bool valid[kRows];

  static constexpr int kXWords = kRows * kRowWords;

  TREADLE_DEVICE void CopyWeights(int step, Words4* slot) const {
    TREADLE_UNROLL
    for (int i = 0; i < 2 * kFeatures; ++i) {
      const uint16_t* from = weights[i] + static_cast<int64_t>(step) * kDenseStep;
      simt::CopyAsync16(slot + (2 * i) * simt::kWarp, from);
      simt::CopyAsync16(slot + (2 * i + 1) * simt::kWarp, from + kDenseStep / 2);
    }
  }
  // Which of this lane's rows word i belongs to.
  TREADLE_DEVICE static constexpr int RowOf(int i) { return i / kRowWords; }
  // Where word i of a step begins.
  TREADLE_DEVICE const uint16_t* Word(int step, int i) const {
    return x[RowOf(i)] + static_cast<int64_t>(step) * kDenseStep + i % kRowWords * kDenseStep / 2;
  }
  TREADLE_DEVICE void CopyX(int step, Words4* slot) const {
    TREADLE_UNROLL
    for (int i = 0; i < kXWords; ++i) {
      simt::CopyAsync16(slot + (WeightWords(kFeatures) + i) * simt::kWarp, Word(step, i),
                        valid[RowOf(i)]);
    }
  }
  TREADLE_DEVICE void LoadX(int step, Words4 (&words)[kXWords]) const {
    TREADLE_UNROLL
    for (int i = 0; i < kXWords; ++i) {
      words[i] =
          valid[RowOf(i)] ? *reinterpret_cast<const Words4*>(Word(step, i)) : Words4{0, 0, 0, 0};
    }
  }
};

// The first stages of a warp's ring, of which each lane has its part: `first` is its first step.
template <int kStages, int kStage, int kFeatures, int kRows>
TREADLE_DEVICE void FillRing(const Sources<kFeatures, kRows>& sources, int first, int steps,
                             Words4* ring) {
  constexpr int kXWords = Sources<kFeatures, kRows>::kXWords;
  TREADLE_UNROLL
  for (int i = 0; i < kStages - 1; ++i) {
    const int step = first + i * kDenseParts;
    if (step < steps) sources.CopyWeights(step, ring + i * kStage);
    simt::CopyAsyncCommit();
  }
  simt::AwaitEarlierLaunches();
  Words4 x[kStages - 1][kXWords];
  TREADLE_UNROLL
  for (int i = 0; i < kStages - 1; ++i) {
    const int step = first + i * kDenseParts;
    if (step < steps) sources.LoadX(step, x[i]);
  }
  TREADLE_UNROLL
  for (int i = 0; i < kStages - 1; ++i) {
    if (first + i * kDenseParts >= steps) break;
    TREADLE_UNROLL
    for (int word = 0; word < kXWords; ++word) {
      ring[i * kStage + (WeightWords(kFeatures) + word) * simt::kWarp] = x[i][word];
    }
  }
}

template <bool kBf16, int kFeatures, int kRows>
TREADLE_DEVICE void MultiplyStage(const Words4* slot, float (&sums)[kFeatures][kRows][4]) {
  TREADLE_UNROLL
  for (int half = 0; half < 2; ++half) {
    Words4 x[kRows];
    TREADLE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      x[r] = slot[(WeightWords(kFeatures) + r * kRowWords + half) * simt::kWarp];
    }
    TREADLE_UNROLL
    for (int f = 0; f < kFeatures; ++f) {
      const Words4 low = slot[(4 * f + half) * simt::kWarp];
      const Words4 high = slot[(4 * f + 2 + half) * simt::kWarp];
      TREADLE_UNROLL
      for (int r = 0; r < kRows; ++r) DenseMma<kBf16>(sums[f][r], low, high, x[r]);
    }
  }
}

// y = parts in ascending order + bias + out; parts: [kDenseParts, 8 kRows, SumStride].
template <int kFeatures, int kRows>
TREADLE_DEVICE void CombineParts(const float* parts, const DenseSegment& segment, int feature0,
                                 int rows) {
  constexpr int kPart = 8 * kRows * SumStride(kFeatures);
  const int count = rows * 16 * kFeatures;
  for (int i = simt::Thread(); i < count; i += kThreads) {
    const int row = i / (16 * kFeatures);
    const int feature = i % (16 * kFeatures);
    if (feature0 + feature >= segment.n) continue;
    const float* part = parts + row * SumStride(kFeatures) + feature;
    float y = part[0];
    TREADLE_UNROLL
    for (int p = 1; p < kDenseParts; ++p) y += part[p * kPart];
    StoreResult(segment, row, feature0 + feature, y);
  }
}

template <bool kBf16, int kFeatures, int kRows, int kStages>
TREADLE_KERNEL(kThreads)
void DenseStreamKernel(DenseProduct p) {
  constexpr int kStage = StageWords(kFeatures, kRows) * simt::kWarp;
  const int lane = simt::Lane();
  const int warp = simt::Warp();
  const int g = lane / 4;
  const int t = lane % 4;
  const DenseSegment segment = SegmentOf(p, simt::BlockX());
  const int feature0 = (simt::BlockX() - segment.first_tile) * 16 * kFeatures;
  const int steps = (p.k + kDenseStep - 1) / kDenseStep;
  const int64_t stride = static_cast<int64_t>(steps) * kDenseStep;

  Sources<kFeatures, kRows> sources;
  TREADLE_UNROLL
  for (int i = 0; i < 2 * kFeatures; ++i) {
    // Features beyond the last read the last one again; nobody stores them.
    const int feature = feature0 + 8 * i + g < segment.n ? feature0 + 8 * i + g : segment.n - 1;
    sources.weights[i] = static_cast<const uint16_t*>(segment.weights) + feature * stride + 8 * t;
  }
  TREADLE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const int row = 8 * r + g;
    sources.valid[r] = row < p.rows;
    const int64_t from = sources.valid[r] ? row : 0;
    sources.x[r] = static_cast<const uint16_t*>(p.x) + from * p.x_stride + 8 * t;
  }

  Words4* shared = simt::DynamicShared<Words4>();
  Words4* ring = shared + warp * kStages * kStage + lane;
  FillRing<kStages, kStage>(sources, warp, steps, ring);
  float sums[kFeatures][kRows][4] = {};
  int use = 0;
  int fill = kStages - 1;
  for (int step = warp; step < steps; step += kDenseParts) {
    const int ahead = step + (kStages - 1) * kDenseParts;
    if (ahead < steps) {
      sources.CopyWeights(ahead, ring + fill * kStage);
      sources.CopyX(ahead, ring + fill * kStage);
    }
    simt::CopyAsyncCommit();
    simt::CopyAsyncWait<kStages - 1>();
    MultiplyStage<kBf16, kFeatures, kRows>(ring + use * kStage, sums);
    use = use + 1 == kStages ? 0 : use + 1;
    fill = fill + 1 == kStages ? 0 : fill + 1;
  }

  simt::SyncThreads();  // rings are read; the sums of all parts take their place
  float* parts = reinterpret_cast<float*>(shared);
  TREADLE_UNROLL
  for (int f = 0; f < kFeatures; ++f) {
    TREADLE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      TREADLE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = warp * 8 * kRows + 8 * r + 2 * t + i % 2;
        parts[row * SumStride(kFeatures) + 16 * f + g + 8 * (i / 2)] = sums[f][r][i];
      }
    }
  }
  simt::SyncThreads();
  CombineParts<kFeatures, kRows>(parts, segment, feature0, p.rows);
}

using Kernel = void (*)(DenseProduct);

struct Variant {
  DenseTile tile;
  int least_rows;    // below, a narrower tile is as good
  int least_blocks;  // features / (16 tile.features), in quarters of the multiprocessors
  Kernel bf16;
  Kernel f16;
};

template <int kFeatures, int kRows, int kStages>
constexpr Variant MakeVariant(int least_rows, int least_blocks) {
  return {{kFeatures, kRows, kStages},
          least_rows,
          least_blocks,
          DenseStreamKernel<true, kFeatures, kRows, kStages>,
          DenseStreamKernel<false, kFeatures, kRows, kStages>};
}

// The first that fits is taken. Those of 192 KB are for blocks of Hopper and later, those of 144 KB
// and 128 KB for A100, those of 96 KB run everywhere and twice on a multiprocessor of Hopper.
constexpr Variant kVariants[] = {
    MakeVariant<2, 1, 4>(5, 3),   // 160 KB
    MakeVariant<1, 1, 4>(1, 0),   // 96 KB
    MakeVariant<2, 2, 4>(9, 0),   // 192 KB
    MakeVariant<2, 2, 3>(9, 0),   // 144 KB
    MakeVariant<4, 4, 2>(17, 4),  // 192 KB
    MakeVariant<2, 4, 3>(17, 0),  // 192 KB
    MakeVariant<2, 4, 2>(17, 0),  // 128 KB
    MakeVariant<1, 4, 2>(9, 0),   // 96 KB
};

const Variant& ChooseVariant(int64_t features, int64_t rows, const DenseLimits& limits) {
  const auto fits = [&](const Variant& v) {
    const int64_t blocks = features / (16 * v.tile.features);
    return rows >= v.least_rows && rows <= 8 * v.tile.rows &&
           4 * blocks >= int64_t{v.least_blocks} * limits.multiprocessors &&
           DenseStreamSharedBytes(v.tile) <= limits.shared_bytes;
  };
  const auto* variant = std::find_if(std::begin(kVariants), std::end(kVariants), fits);
  TREADLE_CHECK(variant != std::end(kVariants));
  return *variant;
}

}  // namespace

size_t DenseStreamSharedBytes(const DenseTile& tile) {
  return size_t{16} * kThreads * tile.stages * StageWords(tile.features, tile.rows);
}

DenseTile ChooseDenseTile(int64_t features, int64_t rows, const DenseLimits& limits) {
  return ChooseVariant(features, rows, limits).tile;
}

void LaunchDenseStream(Device& device, DenseProduct product, const DenseLimits& limits) {
  int64_t features = 0;
  for (int i = 0; i < product.num_segments; ++i) features += product.segments[i].n;
  const Variant& variant = ChooseVariant(features, product.rows, limits);
  LaunchShape shape;
  shape.grid_x = NumberTiles(product, 16 * variant.tile.features);
  shape.threads = kThreads;
  shape.shared_bytes = DenseStreamSharedBytes(variant.tile);
  device.Launch(product.dtype == DType::kBF16 ? variant.bf16 : variant.f16, shape, product);
}

}  // namespace treadle::cuda
