// f32 weights with f32 activations, by plain fused multiply-adds: for --dtype fp32, where exactness
// is the point and speed is not.
//
// A warp computes two features for up to eight rows; its lanes share k, each takes four elements of
// every 128, and a fixed tree adds the lanes' sums. So a row's bits do not depend on the others.
#include "kernels/cuda/dense/dense_fragments.h"

namespace treadle::cuda {
namespace {

using simt::Words4;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / simt::kWarp;
constexpr int kFeatures = 2;  // of a warp
constexpr int kRows = 8;      // of a block
constexpr int kLaneElements = 4;

TREADLE_KERNEL(kThreads) void DenseF32Kernel(DenseProduct p) {
  simt::AwaitEarlierLaunches();
  const DenseSegment segment = SegmentOf(p, simt::BlockX());
  const int feature0 = ((simt::BlockX() - segment.first_tile) * kWarps + simt::Warp()) * kFeatures;
  const int row0 = simt::BlockY() * kRows;
  const int64_t stride = (p.k + kDenseStep - 1) / kDenseStep * static_cast<int64_t>(kDenseStep);
  const float* weights = static_cast<const float*>(segment.weights);
  float sums[kFeatures][kRows] = {};
  for (int k = simt::Lane() * kLaneElements; k < p.k; k += simt::kWarp * kLaneElements) {
    float w[kFeatures][kLaneElements];
    TREADLE_UNROLL
    for (int f = 0; f < kFeatures; ++f) {
      const int feature = feature0 + f < segment.n ? feature0 + f : segment.n - 1;
      const Words4 words = simt::LoadOnce16(weights + feature * stride + k);
      simt::LoadFloats(&words, w[f]);
    }
    TREADLE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (row0 + r >= p.rows) continue;
      const float* x = static_cast<const float*>(p.x) + (row0 + r) * p.x_stride + k;
      TREADLE_UNROLL
      for (int i = 0; i < kLaneElements; ++i) {
        if (k + i >= p.k) continue;
        TREADLE_UNROLL
        for (int f = 0; f < kFeatures; ++f) sums[f][r] = simt::Fma(w[f][i], x[i], sums[f][r]);
      }
    }
  }
  TREADLE_UNROLL
  for (int f = 0; f < kFeatures; ++f) {
    TREADLE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float sum = simt::WarpSum(sums[f][r]);
      if (simt::Lane() != 0 || row0 + r >= p.rows || feature0 + f >= segment.n) continue;
      StoreResult(segment, row0 + r, feature0 + f, sum);
    }
  }
}

}  // namespace

void LaunchDenseF32(Device& device, DenseProduct product) {
  constexpr int64_t kMaxRows = int64_t{65535} * kRows;
  TREADLE_CHECK(product.rows <= kMaxRows);
  LaunchShape shape;
  shape.grid_x = NumberTiles(product, kWarps * kFeatures);
  shape.grid_y = (product.rows + kRows - 1) / kRows;
  shape.threads = kThreads;
  device.Launch(DenseF32Kernel, shape, product);
}

}  // namespace treadle::cuda
