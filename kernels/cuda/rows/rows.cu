// Norms, activations and copies: ops on rows of features. Contracts: kernels/backend.h.
//
// Columns are dealt out in groups of four, whatever a row's alignment, so that the order of every
// sum depends on the number of columns alone (N1); a group is one 16-byte access where it can be.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/row_output.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {
namespace {

constexpr int kGroup = 4;

// A [rows, cols] f32 matrix as kernels see it.
struct Matrix {
  const float* data = nullptr;
  int64_t stride = 0;
};

Matrix MatrixOf(const Tensor& tensor) {
  TREADLE_CHECK(tensor.dtype == DType::kF32);
  return {static_cast<const float*>(tensor.data), tensor.stride};
}

TREADLE_DEVICE bool IsAligned(const float* p) { return (reinterpret_cast<uintptr_t>(p) & 15) == 0; }

// Columns [column, column + 4) of a row; 0 beyond its end.
TREADLE_DEVICE void LoadGroup(const float* row, int column, int cols, float (&x)[kGroup]) {
  if (column + kGroup <= cols && IsAligned(row + column)) {
    simt::LoadFloats(row + column, x);
    return;
  }
  TREADLE_UNROLL
  for (int i = 0; i < kGroup; ++i) x[i] = column + i < cols ? row[column + i] : 0.0f;
}

TREADLE_DEVICE void StoreGroup(const RowOutput& out, int64_t row_index, int column, int cols,
                               const float (&x)[kGroup]) {
  const int64_t first = row_index * out.stride;
  if (out.dtype != DType::kF32) {  // whole groups, aligned
    auto* to = static_cast<uint16_t*>(out.data) + first + column;
    *reinterpret_cast<simt::Words2*>(to) = {RoundPair(out.dtype, x[0], x[1]),
                                            RoundPair(out.dtype, x[2], x[3])};
    return;
  }
  float* row = static_cast<float*>(out.data) + first;
  if (column + kGroup <= cols && IsAligned(row + column)) {
    simt::StoreFloats(x, row + column);
    return;
  }
  TREADLE_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    if (column + i < cols) row[column + i] = x[i];
  }
}

// -- norms: one block per row ---------------------------------------------------------------------

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
  const RowGroups groups(p.x.data + simt::BlockX() * p.x.stride, p.cols);
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
  const RowGroups groups(p.x.data + simt::BlockX() * p.x.stride, p.cols);
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

int64_t Groups(int64_t cols) { return (cols + kGroup - 1) / kGroup; }

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

// -- element by element: a thread per group of the matrix -----------------------------------------

constexpr int kElementThreads = 256;

struct ElementParams {
  Matrix a = {};
  Matrix b = {};
  RowOutput out = {};
  const int32_t* rows = nullptr;  // Gather's; null: all of them
  float limit = 0;                // ClampedSwiGlu's; SoftCap's
  XieluScales xielu = {};
  int32_t cols = 0;
  uint32_t row_groups = 0;  // groups of a row
  uint32_t groups = 0;      // of all rows
};

struct Place {
  int64_t row;
  int column;
};
// The place of this thread's group; false if there is none.
TREADLE_DEVICE bool FindPlace(const ElementParams& p, Place& place) {
  const uint32_t group = static_cast<uint32_t>(simt::BlockX()) * kElementThreads +
                         static_cast<uint32_t>(simt::Thread());
  if (group >= p.groups) return false;
  place.row = group / p.row_groups;
  place.column = static_cast<int>(group % p.row_groups) * kGroup;
  return true;
}

TREADLE_DEVICE float Silu(float x) { return simt::Divide(x, 1.0f + simt::Exp(-x)); }

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), which does not cancel.
TREADLE_DEVICE float GeluTanh(float x) {
  constexpr float kTwiceRoot = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  const float twice_u = kTwiceRoot * simt::Fma(0.044715f * x * x, x, x);
  return simt::Divide(x, 1.0f + simt::Exp(-twice_u));
}

TREADLE_DEVICE float ErfGelu(float x) {
  constexpr float kHalfRoot = 0.70710678118654752f;  // 1 / sqrt(2)
  return 0.5f * x * simt::Erfc(-kHalfRoot * x);
}

TREADLE_DEVICE float Unchanged(float x) { return x; }

TREADLE_DEVICE float Rectified(float x) { return x > 0.0f ? x : 0.0f; }

template <float (*kActivation)(float)>
TREADLE_KERNEL(kElementThreads)
void GatedKernel(ElementParams p) {
  simt::AwaitEarlierLaunches();
  Place at;
  if (!FindPlace(p, at)) return;
  float gate[kGroup], up[kGroup], y[kGroup];
  LoadGroup(p.a.data + at.row * p.a.stride, at.column, p.cols, gate);
  LoadGroup(p.b.data + at.row * p.b.stride, at.column, p.cols, up);
  TREADLE_UNROLL
  for (int i = 0; i < kGroup; ++i) y[i] = kActivation(gate[i]) * up[i];
  StoreGroup(p.out, at.row, at.column, p.cols, y);
}

// a: one gate for each element of b, or for each row.
template <bool kOfRows>
TREADLE_KERNEL(kElementThreads)
void SigmoidGateKernel(ElementParams p) {
  simt::AwaitEarlierLaunches();
  Place at;
  if (!FindPlace(p, at)) return;
  float gate[kGroup], x[kGroup], y[kGroup];
  const float* const gates = p.a.data + at.row * p.a.stride;
  if (kOfRows) {
    TREADLE_UNROLL
    for (int i = 0; i < kGroup; ++i) gate[i] = *gates;
  } else {
    LoadGroup(gates, at.column, p.cols, gate);
  }
  LoadGroup(p.b.data + at.row * p.b.stride, at.column, p.cols, x);
  TREADLE_UNROLL
  for (int i = 0; i < kGroup; ++i) y[i] = simt::Divide(x[i], 1.0f + simt::Exp(-gate[i]));
  StoreGroup(p.out, at.row, at.column, p.cols, y);
}

TREADLE_KERNEL(kElementThreads) void ClampedSwiGluKernel(ElementParams p) {
  simt::AwaitEarlierLaunches();
  Place at;
  if (!FindPlace(p, at)) return;
  float gate[kGroup], up[kGroup], y[kGroup];
  LoadGroup(p.a.data + at.row * p.a.stride, at.column, p.cols, gate);
  LoadGroup(p.b.data + at.row * p.b.stride, at.column, p.cols, up);
  TREADLE_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    const float x = gate[i] > p.limit ? p.limit : gate[i];
    const float more = up[i] > p.limit ? p.limit : up[i] < -p.limit ? -p.limit : up[i];
    y[i] = (more + 1.0f) * simt::Divide(x, 1.0f + simt::Exp(-1.702f * x));
  }
  StoreGroup(p.out, at.row, at.column, p.cols, y);
}

template <float (*kActivation)(float)>
TREADLE_DEVICE float Unscaled(const ElementParams&, float x) {
  return kActivation(x);
}
TREADLE_DEVICE float SoftCapped(const ElementParams& p, float x) {
  return p.limit * simt::Tanh(simt::Divide(x, p.limit));
}
TREADLE_DEVICE float XieluOf(const ElementParams& p, float x) {
  const XieluScales& s = p.xielu;
  if (x > 0.0f) return simt::Fma(s.positive * x, x, s.slope * x);
  const float under = x > s.largest ? s.largest : x;
  return simt::Fma(s.negative, simt::Expm1(under) - x, s.slope * x);
}

template <float (*kFunction)(const ElementParams&, float)>
TREADLE_KERNEL(kElementThreads)
void FunctionKernel(ElementParams p) {
  simt::AwaitEarlierLaunches();
  Place at;
  if (!FindPlace(p, at)) return;
  float x[kGroup], y[kGroup];
  LoadGroup(p.a.data + at.row * p.a.stride, at.column, p.cols, x);
  TREADLE_UNROLL
  for (int i = 0; i < kGroup; ++i) y[i] = kFunction(p, x[i]);
  StoreGroup(p.out, at.row, at.column, p.cols, y);
}

TREADLE_KERNEL(kElementThreads) void GatherKernel(ElementParams p) {
  simt::AwaitEarlierLaunches();
  Place at;
  if (!FindPlace(p, at)) return;
  const int64_t from = p.rows == nullptr ? at.row : p.rows[at.row];
  if (from < 0) return;
  float x[kGroup];
  LoadGroup(p.a.data + from * p.a.stride, at.column, p.cols, x);
  StoreGroup(p.out, at.row, at.column, p.cols, x);
}

ElementParams GatedParams(const Tensor& gate, const Tensor& up, const Tensor& out) {
  TREADLE_CHECK(gate.rows == out.rows && up.rows == out.rows);
  TREADLE_CHECK(gate.cols == out.cols && up.cols == out.cols);
  OutputOf(out, up);
  return {.a = MatrixOf(gate), .b = MatrixOf(up), .out = OutputOf(out, gate)};
}

void LaunchElements(Device& device, void (*kernel)(ElementParams), ElementParams params,
                    const Tensor& out) {
  const int64_t groups = out.rows * Groups(out.cols);
  TREADLE_CHECK(groups < (int64_t{1} << 31));
  if (groups == 0) return;
  params.cols = static_cast<int32_t>(out.cols);
  params.row_groups = static_cast<uint32_t>(Groups(out.cols));
  params.groups = static_cast<uint32_t>(groups);
  const auto blocks = static_cast<uint32_t>((groups + kElementThreads - 1) / kElementThreads);
  device.Launch(kernel, {.grid_x = blocks, .threads = kElementThreads}, params);
}

void Activate(Device& device, void (*kernel)(ElementParams), const Tensor& x, const Tensor& out,
              ElementParams params = {}) {
  TREADLE_CHECK(x.rows == out.rows && x.cols == out.cols);
  params.a = MatrixOf(x);
  params.out = OutputOf(out, x);
  LaunchElements(device, kernel, params, out);
}

// -- pages ----------------------------------------------------------------------------------------

constexpr int kCopyThreads = 256;
constexpr int64_t kCopiesPerLaunch = 480;

struct CopyPagesParams {
  std::byte* pages;
  int64_t page_bytes;
  int32_t width;  // bytes of a thread: 16, or where pages are not so many times, 4
  int64_t stride;
  int32_t count;
  PageCopy copies[kCopiesPerLaunch];
};

// A thread has the same bytes of every page, so it sees its own earlier copies, and no other's
// matter: copies take effect in order without a barrier.
TREADLE_KERNEL(kCopyThreads) void CopyPagesKernel(CopyPagesParams p) {
  simt::AwaitEarlierLaunches();
  const int64_t at = p.width * (int64_t{simt::BlockX()} * kCopyThreads + simt::Thread());
  if (at >= p.page_bytes) return;
  for (int i = 0; i < p.count; ++i) {
    const auto* from = p.pages + p.copies[i].from * p.stride + at;
    auto* to = p.pages + p.copies[i].to * p.stride + at;
    if (p.width == 16) {
      *reinterpret_cast<simt::Words4*>(to) = *reinterpret_cast<const simt::Words4*>(from);
    } else {
      *reinterpret_cast<float*>(to) = *reinterpret_cast<const float*>(from);
    }
  }
}

// -- the sum of an all-reduce ---------------------------------------------------------------------

// Blocks walk over larger sums: no grid is larger than what fills a GPU a few times.
constexpr int64_t kMaxBlocks = 2048;

struct RankSumParams {
  const float* parts;  // [ranks][count]
  float* out;          // [count]
  int64_t count;
  int ranks;
  bool accumulate;
};

TREADLE_KERNEL(kElementThreads) void RankSumKernel(RankSumParams p) {
  simt::AwaitEarlierLaunches();
  const int64_t step = int64_t{simt::GridX()} * kElementThreads;
  for (int64_t i = int64_t{simt::BlockX()} * kElementThreads + simt::Thread(); i < p.count;
       i += step) {
    float sum = p.parts[i];
    for (int r = 1; r < p.ranks; ++r) sum += p.parts[r * p.count + i];
    p.out[i] = p.accumulate ? p.out[i] + sum : sum;
  }
}

}  // namespace

void RankSum(Device& device, const float* parts, int ranks, int64_t count, bool accumulate,
             float* out) {
  if (count == 0) return;
  const int64_t blocks = std::min((count + kElementThreads - 1) / kElementThreads, kMaxBlocks);
  device.Launch(RankSumKernel,
                {.grid_x = static_cast<uint32_t>(blocks), .threads = kElementThreads},
                RankSumParams{parts, out, count, ranks, accumulate});
}

void CudaOps::RmsNorm(Tensor x, const float* weight, float eps, bool accumulate, Tensor out) {
  if (Ready()) Norm(*device_, RmsNormKernel, x, weight, nullptr, eps, accumulate, out);
}

void CudaOps::LayerNorm(Tensor x, const float* weight, const float* bias, float eps, Tensor out) {
  if (Ready()) Norm(*device_, LayerNormKernel, x, weight, bias, eps, /*accumulate=*/false, out);
}

void CudaOps::SwiGlu(Tensor gate, Tensor up, Tensor out) {
  const ElementParams params = GatedParams(gate, up, out);
  if (Ready()) LaunchElements(*device_, GatedKernel<Silu>, params, out);
}

void CudaOps::ClampedSwiGlu(Tensor gate, Tensor up, float limit, Tensor out) {
  ElementParams params = GatedParams(gate, up, out);
  params.limit = limit;
  if (Ready()) LaunchElements(*device_, ClampedSwiGluKernel, params, out);
}

void CudaOps::GeGlu(Tensor gate, Tensor up, Tensor out) {
  const ElementParams params = GatedParams(gate, up, out);
  if (Ready()) LaunchElements(*device_, GatedKernel<GeluTanh>, params, out);
}

void CudaOps::SigmoidGate(Tensor gate, Tensor x, Tensor out) {
  const bool of_rows = gate.cols == 1 && x.cols > 1;
  ElementParams params = GatedParams(of_rows ? x : gate, x, out);
  if (of_rows) params.a = MatrixOf(gate);
  if (!Ready()) return;
  if (of_rows) {
    LaunchElements(*device_, SigmoidGateKernel<true>, params, out);
  } else {
    LaunchElements(*device_, SigmoidGateKernel<false>, params, out);
  }
}

void CudaOps::Multiply(Tensor x, Tensor y, Tensor out) {
  const ElementParams params = GatedParams(x, y, out);
  if (Ready()) LaunchElements(*device_, GatedKernel<Unchanged>, params, out);
}

void CudaOps::Gelu(Tensor x, Tensor out) {
  if (Ready()) Activate(*device_, FunctionKernel<Unscaled<GeluTanh>>, x, out);
}

void CudaOps::GeluErf(Tensor x, Tensor out) {
  if (Ready()) Activate(*device_, FunctionKernel<Unscaled<ErfGelu>>, x, out);
}

void CudaOps::Relu(Tensor x, Tensor out) {
  if (Ready()) Activate(*device_, FunctionKernel<Unscaled<Rectified>>, x, out);
}

void CudaOps::SoftCap(Tensor x, float cap, Tensor out) {
  if (Ready()) Activate(*device_, FunctionKernel<SoftCapped>, x, out, {.limit = cap});
}

void CudaOps::Xielu(Tensor x, const XieluScales& s, Tensor out) {
  if (Ready()) Activate(*device_, FunctionKernel<XieluOf>, x, out, {.xielu = s});
}

void CudaOps::Gather(Tensor x, std::span<const int32_t> rows, Tensor out) {
  TREADLE_CHECK(out.rows == static_cast<int64_t>(rows.size()) && out.cols == x.cols &&
                out.dtype == DType::kF32);
  if (rows.empty() || !Ready()) return;
  const auto on_device = batch_.OutputRows(rows);
  Keep(on_device.status());
  if (!Ready()) return;
  LaunchElements(*device_, GatherKernel,
                 {.a = MatrixOf(x), .out = OutputOf(out, x), .rows = *on_device}, out);
}

void CudaOps::Copy(Tensor x, Tensor out) {
  TREADLE_CHECK(out.rows == x.rows && out.cols == x.cols && out.dtype == DType::kF32);
  if (!Ready()) return;
  LaunchElements(*device_, GatherKernel, {.a = MatrixOf(x), .out = OutputOf(out, x)}, out);
}

void CudaOps::CopyPages(const KvLayout& layout, std::byte* pages,
                        std::span<const PageCopy> copies) {
  const int64_t bytes = layout.PageBytes();
  const bool wide = (bytes | static_cast<int64_t>(reinterpret_cast<uintptr_t>(pages))) % 16 == 0;
  TREADLE_CHECK(wide || layout.state.present());  // whose pages are any number of floats
  const int32_t width = wide ? 16 : 4;
  const auto blocks = static_cast<uint32_t>((bytes / width + kCopyThreads - 1) / kCopyThreads);
  while (!copies.empty() && Ready()) {
    const size_t count = std::min<size_t>(copies.size(), kCopiesPerLaunch);
    CopyPagesParams params = {.pages = pages,
                              .page_bytes = bytes,
                              .width = width,
                              .stride = layout.PageStride(),
                              .count = static_cast<int32_t>(count),
                              .copies = {}};
    std::copy_n(copies.begin(), count, params.copies);
    device_->Launch(CopyPagesKernel, {.grid_x = blocks, .threads = kCopyThreads}, params);
    copies = copies.subspan(count);
  }
}

}  // namespace treadle::cuda
