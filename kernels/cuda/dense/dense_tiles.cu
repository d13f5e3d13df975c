// Products of many rows with the streaming kernel's order of sums: what deterministic prompts run
// on, and whatever the library does not take.
//
// A block computes 128 features x 128 rows with eight warps of 32 x 64; steps of both operands pass
// through a ring of stages in shared memory, which all warps read. A part's sums are added to the
// total when its last step is done, in ascending order of parts, as the streaming kernel does.
// Cost: 64 operations per byte from L2 and 24 shared loads of 16 bytes per 64 matrix instructions
// of a warp, so at best about half of the matrix peak; weights are read once per 128 rows.
#include "kernels/cuda/dense/dense_fragments.h"

namespace treadle::cuda {
namespace {

using simt::Words4;

constexpr int kThreads = 256;
constexpr int kTile = 128;     // features and rows of a block
constexpr int kFeatures = 2;   // of a warp, in 16
constexpr int kRows = 8;       // of a warp, in 8
constexpr int kStages = 3;     // 96 KB
constexpr int kLineWords = 8;  // 16-byte words of a step of one row
constexpr int kOperandWords = kTile * kLineWords;
constexpr int kStageWords = 2 * kOperandWords;

// Where word `word` of row `row` lies. Odd rows have their halves exchanged, so that the eight
// lanes of a shared access, four words of two rows, meet 32 different banks.
TREADLE_DEVICE int Place(int row, int word) { return row * kLineWords + (word ^ ((row & 1) << 2)); }

struct Tile {
  const uint16_t* weights;  // of the block's first feature
  const uint16_t* x;        // of its first row
  int features;             // valid ones
  int rows;
  int64_t stride;  // of weights
  int64_t x_stride;

  TREADLE_DEVICE void Copy(int step, Words4* stage) const {
    TREADLE_UNROLL
    for (int i = 0; i < kOperandWords / kThreads; ++i) {
      const int at = simt::Thread() + i * kThreads;
      const int row = at / kLineWords;
      const int word = at % kLineWords;
      const int64_t column = static_cast<int64_t>(step) * kDenseStep + word * 8;
      const bool feature_valid = row < features;
      const bool row_valid = row < rows;
      simt::CopyAsync16(stage + Place(row, word),
                        weights + (feature_valid ? row * stride + column : 0), feature_valid);
      simt::CopyAsync16(stage + kOperandWords + Place(row, word),
                        x + (row_valid ? row * x_stride + column : 0), row_valid);
    }
  }
};

template <bool kBf16>
TREADLE_DEVICE void MultiplyStage(const Words4* stage, int feature, int row,
                                  float (&sums)[kFeatures][kRows][4]) {
  const int g = simt::Lane() / 4;
  const int t = simt::Lane() % 4;
  TREADLE_UNROLL
  for (int half = 0; half < 2; ++half) {
    Words4 low[kFeatures], high[kFeatures];
    TREADLE_UNROLL
    for (int f = 0; f < kFeatures; ++f) {
      low[f] = stage[Place(feature + 16 * f + g, 4 * half + t)];
      high[f] = stage[Place(feature + 16 * f + 8 + g, 4 * half + t)];
    }
    TREADLE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Words4 x = stage[kOperandWords + Place(row + 8 * r + g, 4 * half + t)];
      TREADLE_UNROLL
      for (int f = 0; f < kFeatures; ++f) DenseMma<kBf16>(sums[f][r], low[f], high[f], x);
    }
  }
}

// The step after `step` in the order of parts: kDenseParts further, or the next part's first.
TREADLE_DEVICE int NextStep(int step, int steps) {
  return step + kDenseParts < steps ? step + kDenseParts : step % kDenseParts + 1;
}

// total += sums (or = for the first part); sums = 0.
TREADLE_DEVICE void EndPart(bool first, float (&sums)[kFeatures][kRows][4],
                            float (&total)[kFeatures][kRows][4]) {
  TREADLE_UNROLL
  for (int f = 0; f < kFeatures; ++f) {
    TREADLE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      TREADLE_UNROLL
      for (int i = 0; i < 4; ++i) {
        total[f][r][i] = first ? sums[f][r][i] : total[f][r][i] + sums[f][r][i];
        sums[f][r][i] = 0;
      }
    }
  }
}

template <bool kBf16>
TREADLE_KERNEL(kThreads)
void DenseTilesKernel(DenseProduct p) {
  simt::AwaitEarlierLaunches();
  const DenseSegment segment = SegmentOf(p, simt::BlockY());
  const int feature0 = (simt::BlockY() - segment.first_tile) * kTile;
  const int row0 = simt::BlockX() * kTile;
  const int steps = (p.k + kDenseStep - 1) / kDenseStep;
  Tile tile;
  tile.stride = static_cast<int64_t>(steps) * kDenseStep;
  tile.weights = static_cast<const uint16_t*>(segment.weights) + feature0 * tile.stride;
  tile.x_stride = p.x_stride;
  tile.x = static_cast<const uint16_t*>(p.x) + row0 * tile.x_stride;
  tile.features = segment.n - feature0;
  tile.rows = p.rows - row0;

  Words4* ring = simt::DynamicShared<Words4>();
  const int feature = simt::Warp() % 4 * 16 * kFeatures;
  const int row = simt::Warp() / 4 * 8 * kRows;
  float sums[kFeatures][kRows][4] = {};
  float total[kFeatures][kRows][4] = {};
  int copied = 0;  // the step to copy next
  TREADLE_UNROLL
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < steps) {
      tile.Copy(copied, ring + i * kStageWords);
      copied = NextStep(copied, steps);
    }
    simt::CopyAsyncCommit();
  }
  int step = 0;
  int part = 0;
  for (int i = 0; i < steps; ++i) {
    simt::CopyAsyncWait<kStages - 2>();
    simt::SyncThreads();  // everyone's copies are here, and nobody reads the stage before this one
    if (i + kStages - 1 < steps) {
      tile.Copy(copied, ring + (i + kStages - 1) % kStages * kStageWords);
      copied = NextStep(copied, steps);
    }
    simt::CopyAsyncCommit();
    MultiplyStage<kBf16>(ring + i % kStages * kStageWords, feature, row, sums);
    if (step + kDenseParts >= steps) {
      EndPart(part == 0, sums, total);
      ++part;
    }
    step = NextStep(step, steps);
  }

  const int g = simt::Lane() / 4;
  const int t = simt::Lane() % 4;
  TREADLE_UNROLL
  for (int f = 0; f < kFeatures; ++f) {
    TREADLE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      TREADLE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int n = feature0 + feature + 16 * f + g + 8 * (i / 2);
        const int m = row0 + row + 8 * r + 2 * t + i % 2;
        if (n >= segment.n || m >= p.rows) continue;
        float y = total[f][r][i];
        if (steps < kDenseParts) y += 0.0f;  // the streaming kernel adds its empty parts
        StoreResult(segment, m, n, y);
      }
    }
  }
}

}  // namespace

void LaunchDenseTiles(Device& device, DenseProduct product) {
  LaunchShape shape;
  shape.grid_x = (product.rows + kTile - 1) / kTile;  // neighbours share weights in L2
  shape.grid_y = NumberTiles(product, kTile);
  shape.threads = kThreads;
  shape.shared_bytes = sizeof(Words4) * kStages * kStageWords;
  device.Launch(product.dtype == DType::kBF16 ? DenseTilesKernel<true> : DenseTilesKernel<false>,
                shape, product);
}

}  // namespace treadle::cuda
