// Route and Mix, in their simplest form: a thread per row, and one per element. Contracts:
// kernels/backend.h.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/rows/matrix.h"

namespace treadle::cuda {
namespace {

constexpr int kThreads = 256;

uint32_t BlocksFor(int64_t threads) {
  TREADLE_CHECK(threads < (int64_t{1} << 31));
  return static_cast<uint32_t>((threads + kThreads - 1) / kThreads);
}

TREADLE_DEVICE int64_t ThreadOfGrid() {
  return int64_t{simt::BlockX()} * kThreads + simt::Thread();
}

struct RouteParams {
  Matrix logits;        // [rows, experts]
  Matrix ids, weights;  // [rows, chosen]
  int32_t rows;
  int32_t experts;
  int32_t chosen;
  Routing routing;
};

TREADLE_DEVICE float Sigmoid(float x) { return simt::Divide(1.0f, 1.0f + simt::Exp(-x)); }

// The key that experts are chosen by: NaN is less than all else.
TREADLE_DEVICE float KeyOf(const Routing& routing, const float* logits, int expert) {
  float key = logits[expert];
  if (routing.sigmoid && routing.bias != nullptr) key = Sigmoid(key) + routing.bias[expert];
  return key == key ? key : -simt::Infinity();
}

TREADLE_KERNEL(kThreads) void RouteKernel(RouteParams p) {
  simt::AwaitEarlierLaunches();
  const int64_t row = ThreadOfGrid();
  if (row >= p.rows) return;
  const float* x = p.logits.Row(row);
  float* weights = p.weights.Row(row);
  int last = -1;  // the one that was chosen before
  float bound = simt::Infinity(), largest = 0.0f, sum = 0.0f;
  for (int j = 0; j < p.chosen; ++j) {
    int best = -1;
    float best_key = 0.0f;
    for (int i = 0; i < p.experts; ++i) {
      const float key = KeyOf(p.routing, x, i);
      const bool left = key < bound || (key == bound && i > last);
      if (left && (best < 0 || key > best_key)) best = i, best_key = key;
    }
    if (j == 0) largest = x[best];
    p.ids.Row(row)[j] = static_cast<float>(best);
    weights[j] = p.routing.sigmoid ? Sigmoid(x[best]) : simt::Exp(x[best] - largest);
    sum += weights[j];
    last = best;
    bound = best_key;
  }
  if (!p.routing.normalize) {
    sum = p.routing.sigmoid ? 1.0f : 0.0f;
    for (int i = 0; i < p.experts && !p.routing.sigmoid; ++i) sum += simt::Exp(x[i] - largest);
  }
  for (int j = 0; j < p.chosen; ++j) {
    weights[j] = simt::Divide(weights[j], sum) * p.routing.scale;
    if (p.routing.expert_scales != nullptr) {
      weights[j] *= p.routing.expert_scales[static_cast<int>(p.ids.Row(row)[j])];
    }
  }
}

struct MixParams {
  Matrix x;               // [*, cols]
  const int32_t* places;  // [rows, chosen]
  Matrix weights;         // [rows, chosen]
  Matrix out;             // [rows, cols]
  int64_t elements;
  int32_t cols;
  int32_t chosen;
  bool accumulate;
};

TREADLE_KERNEL(kThreads) void MixKernel(MixParams p) {
  simt::AwaitEarlierLaunches();
  const int64_t element = ThreadOfGrid();
  if (element >= p.elements) return;
  const int64_t row = element / p.cols, column = element % p.cols;
  float sum = 0.0f;
  for (int j = 0; j < p.chosen; ++j) {
    const float x = p.x.Row(p.places[row * p.chosen + j])[column];
    sum = simt::Fma(p.weights.Row(row)[j], x, sum);
  }
  float& out = p.out.Row(row)[column];
  out = p.accumulate ? out + sum : sum;
}

}  // namespace

void CudaOps::Route(Tensor logits, const Routing& routing, Tensor ids, Tensor weights) {
  TREADLE_CHECK(logits.rows == ids.rows && weights.rows == ids.rows && weights.cols == ids.cols &&
                ids.cols <= logits.cols);
  TREADLE_CHECK(routing.groups == 1);  // no model with groups gets as far: HasLatents
  if (ids.rows == 0 || !Ready()) return;
  device_->Launch(RouteKernel, {.grid_x = BlocksFor(ids.rows), .threads = kThreads},
                  RouteParams{MatrixOf(logits), MatrixOf(ids), MatrixOf(weights),
                              static_cast<int32_t>(ids.rows), static_cast<int32_t>(logits.cols),
                              static_cast<int32_t>(ids.cols), routing});
}

void CudaOps::Mix(Tensor x, std::span<const int32_t> places, Tensor weights, bool accumulate,
                  Tensor out) {
  TREADLE_CHECK(x.cols == out.cols && weights.rows == out.rows &&
                static_cast<int64_t>(places.size()) == weights.rows * weights.cols);
  if (places.empty() || !Ready()) return;
  const auto on_device = batch_.OutputRows(places);
  Keep(on_device.status());
  if (!Ready()) return;
  const int64_t elements = out.rows * out.cols;
  device_->Launch(
      MixKernel, {.grid_x = BlocksFor(elements), .threads = kThreads},
      MixParams{MatrixOf(x), *on_device, MatrixOf(weights), MatrixOf(out), elements,
                static_cast<int32_t>(out.cols), static_cast<int32_t>(weights.cols), accumulate});
}

}  // namespace treadle::cuda
