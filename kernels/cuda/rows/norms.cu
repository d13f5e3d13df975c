// RmsNorm and LayerNorm: a block for each row. Contracts: kernels/backend.h.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/rows/matrix.h"

namespace treadle::cuda {
namespace {

constexpr int kNormThreads = 1024;
// Groups of a thread that stay in registers between the passes over a row; those of rows of more
// than kHeld * 4 * 1024 columns are read again.
constexpr int kHeld = 4;

struct NormParams {
  Matrix x;
  RowOutput out;
  const float* weight;  // [cols]
  const float* bias;    // [cols] or null
  float eps;
  int32_t cols;
  bool accumulate;  // RmsNorm's; then out is f32
};

// Every thread gets the sum: of warps by exchange, then of the warps' sums in ascending order.
// partial: [32], not in use by anything else since the last barrier.
TREADLE_DEVICE float BlockSum(float x, float* partial) {
  x = simt::WarpSum(x);
  if (simt::Lane() == 0) partial[simt::Warp()] = x;
  simt::SyncThreads();
  float sum = 0;
  for (int warp = 0; warp < simt::Threads() / simt::kWarp; ++warp) sum += partial[warp];
  return sum;
}

// The groups of one thread in a row: the first kHeld in registers.
class RowGroups {
 public:
  TREADLE_DEVICE RowGroups(const float* row, int cols) : row_(row), cols_(cols) {
    TREADLE_UNROLL
    for (int i = 0; i < kHeld; ++i) LoadGroup(row, Column(i), cols, held_[i]);
  }

  TREADLE_DEVICE static int Column(int i) {
    return kGroup * (simt::Thread() + i * simt::Threads());
  }

  // body(first column, values of the group), ascending.
  template <typename Body>
  TREADLE_DEVICE void ForEach(Body body) const {
    TREADLE_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      if (Column(i) < cols_) body(Column(i), held_[i]);
    }
    for (int column = Column(kHeld); column < cols_; column += kGroup * simt::Threads()) {
      float x[kGroup];
      LoadGroup(row_, column, cols_, x);
      body(column, x);
    }
  }

 private:
  const float* row_;
  int cols_;
  float held_[kHeld][kGroup];
};

TREADLE_KERNEL(kNormThreads) void RmsNormKernel(NormParams p) {
  simt::AwaitEarlierLaunches();
  float* partial = simt::DynamicShared<float>();
  const RowGroups groups(p.x.Row(simt::BlockX()), p.cols);
  float squares = 0;
  groups.ForEach([&](int, const float(&x)[kGroup]) {  // zeros beyond the end add nothing
    TREADLE_UNROLL
    for (int i = 0; i < kGroup; ++i) squares = simt::Fma(x[i], x[i], squares);
  });
  const float mean = simt::Divide(BlockSum(squares, partial), static_cast<float>(p.cols));
  const float scale = simt::Divide(1.0f, simt::Sqrt(mean + p.eps));
  groups.ForEach([&](int column, const float(&x)[kGroup]) {
    float weight[kGroup], y[kGroup];
    LoadGroup(p.weight, column, p.cols, weight);
    TREADLE_UNROLL
    for (int i = 0; i < kGroup; ++i) y[i] = x[i] * scale * weight[i];
    if (p.accumulate) {
      float before[kGroup];
      LoadGroup(static_cast<const float*>(p.out.data) + simt::BlockX() * p.out.stride, column,
                p.cols, before);
      TREADLE_UNROLL
      for (int i = 0; i < kGroup; ++i) y[i] += before[i];
    }
    StoreGroup(p.out, simt::BlockX(), column, p.cols, y);
  });
}

TREADLE_KERNEL(kNormThreads) void LayerNormKernel(NormParams p) {
  simt::AwaitEarlierLaunches();
  float* partial = simt::DynamicShared<float>();  // [2][32]: one for each sum
  const RowGroups groups(p.x.Row(simt::BlockX()), p.cols);
  const float count = static_cast<float>(p.cols);
  float sum = 0;
  groups.ForEach([&](int, const float(&x)[kGroup]) {
    TREADLE_UNROLL
    for (int i = 0; i < kGroup; ++i) sum += x[i];
  });
  const float mean = simt::Divide(BlockSum(sum, partial), count);
  float squares = 0;
  groups.ForEach([&](int column, const float(&x)[kGroup]) {
    TREADLE_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const float d = column + i < p.cols ? x[i] - mean : 0.0f;
      squares = simt::Fma(d, d, squares);
    }
  });
  const float variance = simt::Divide(BlockSum(squares, partial + simt::kWarp), count);
  const float scale = simt::Divide(1.0f, simt::Sqrt(variance + p.eps));
  groups.ForEach([&](int column, const float(&x)[kGroup]) {
    float weight[kGroup], y[kGroup];
    float bias[kGroup] = {0, 0, 0, 0};
    LoadGroup(p.weight, column, p.cols, weight);
    if (p.bias != nullptr) LoadGroup(p.bias, column, p.cols, bias);
    TREADLE_UNROLL
    for (int i = 0; i < kGroup; ++i) y[i] = simt::Fma((x[i] - mean) * scale, weight[i], bias[i]);
    StoreGroup(p.out, simt::BlockX(), column, p.cols, y);
  });
}

// As many threads as a row has groups, so that the threads, and with them the sums' order, follow
// from the columns.
uint32_t ThreadsFor(int64_t groups, int most) {
  const int64_t warps = (groups + simt::kWarp - 1) / simt::kWarp;
  return static_cast<uint32_t>(std::clamp<int64_t>(warps * simt::kWarp, simt::kWarp, most));
}

void Norm(Device& device, void (*kernel)(NormParams), Tensor x, const float* weight,
          const float* bias, float eps, bool accumulate, Tensor out) {
  TREADLE_CHECK(!accumulate || out.dtype == DType::kF32);
  TREADLE_CHECK(x.rows == out.rows && x.cols == out.cols && x.cols < (int64_t{1} << 28));
  if (x.rows == 0 || x.cols == 0) return;
  const NormParams params = {
      MatrixOf(x), OutputOf(out, x), weight, bias, eps, static_cast<int32_t>(x.cols), accumulate};
  device.Launch(kernel,
                {.grid_x = static_cast<uint32_t>(x.rows),
                 .threads = ThreadsFor(Groups(x.cols), kNormThreads),
                 .shared_bytes = 2 * simt::kWarp * sizeof(float)},
                params);
}

}  // namespace

void CudaOps::RmsNorm(Tensor x, const float* weight, float eps, bool accumulate, Tensor out) {
  if (Ready()) Norm(*device_, RmsNormKernel, x, weight, nullptr, eps, accumulate, out);
}

void CudaOps::LayerNorm(Tensor x, const float* weight, const float* bias, float eps, Tensor out) {
  if (Ready()) Norm(*device_, LayerNormKernel, x, weight, bias, eps, /*accumulate=*/false, out);
}

}  // namespace treadle::cuda
