// Activations, products and copies, element by element: a thread for each group of the matrix.
// And the sum of an all-reduce. Contracts: kernels/backend.h, kernels/cuda/ops.h.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/matrix.h"

namespace treadle::cuda {
namespace {

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

// -- functions of one element ---------------------------------------------------------------------

TREADLE_DEVICE float Silu(const ElementParams&, float x) {
  return simt::Divide(x, 1.0f + simt::Exp(-x));
}

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), which does not cancel.
TREADLE_DEVICE float GeluTanh(const ElementParams&, float x) {
  constexpr float kTwiceRoot = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  const float twice_u = kTwiceRoot * simt::Fma(0.044715f * x * x, x, x);
  return simt::Divide(x, 1.0f + simt::Exp(-twice_u));
}

TREADLE_DEVICE float ErfGelu(const ElementParams&, float x) {
  constexpr float kHalfRoot = 0.70710678118654752f;  // 1 / sqrt(2)
  return 0.5f * x * simt::Erfc(-kHalfRoot * x);
}

TREADLE_DEVICE float Unchanged(const ElementParams&, float x) { return x; }

TREADLE_DEVICE float Rectified(const ElementParams&, float x) { return x > 0.0f ? x : 0.0f; }

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
  LoadGroup(p.a.Row(at.row), at.column, p.cols, x);
  TREADLE_UNROLL
  for (int i = 0; i < kGroup; ++i) y[i] = kFunction(p, x[i]);
  StoreGroup(p.out, at.row, at.column, p.cols, y);
}

// -- functions of two elements: of a gate and what it lets pass, or of two factors ----------------

template <float (*kActivation)(const ElementParams&, float)>
TREADLE_DEVICE float Gated(const ElementParams& p, float gate, float up) {
  return kActivation(p, gate) * up;
}
TREADLE_DEVICE float SigmoidGated(const ElementParams&, float gate, float x) {
  return simt::Divide(x, 1.0f + simt::Exp(-gate));
}
TREADLE_DEVICE float ClampedSwiGlued(const ElementParams& p, float gate, float up) {
  const float x = gate > p.limit ? p.limit : gate;
  const float more = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
  return (more + 1.0f) * simt::Divide(x, 1.0f + simt::Exp(-1.702f * x));
}

// a: an element for each of b, or with kOfRows for each row.
template <float (*kFunction)(const ElementParams&, float, float), bool kOfRows = false>
TREADLE_KERNEL(kElementThreads)
void PairKernel(ElementParams p) {
  simt::AwaitEarlierLaunches();
  Place at;
  if (!FindPlace(p, at)) return;
  float a[kGroup], b[kGroup], y[kGroup];
  if (kOfRows) {
    TREADLE_UNROLL
    for (int i = 0; i < kGroup; ++i) a[i] = *p.a.Row(at.row);
  } else {
    LoadGroup(p.a.Row(at.row), at.column, p.cols, a);
  }
  LoadGroup(p.b.Row(at.row), at.column, p.cols, b);
  TREADLE_UNROLL
  for (int i = 0; i < kGroup; ++i) y[i] = kFunction(p, a[i], b[i]);
  StoreGroup(p.out, at.row, at.column, p.cols, y);
}

// -- copies ---------------------------------------------------------------------------------------

TREADLE_KERNEL(kElementThreads) void GatherKernel(ElementParams p) {
  simt::AwaitEarlierLaunches();
  Place at;
  if (!FindPlace(p, at)) return;
  const int64_t from = p.rows == nullptr ? at.row : p.rows[at.row];
  if (from < 0) return;
  float x[kGroup];
  LoadGroup(p.a.Row(from), at.column, p.cols, x);
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

void CudaOps::SwiGlu(Tensor gate, Tensor up, Tensor out) {
  const ElementParams params = GatedParams(gate, up, out);
  if (Ready()) LaunchElements(*device_, PairKernel<Gated<Silu>>, params, out);
}

void CudaOps::ClampedSwiGlu(Tensor gate, Tensor up, float limit, Tensor out) {
  ElementParams params = GatedParams(gate, up, out);
  params.limit = limit;
  if (Ready()) LaunchElements(*device_, PairKernel<ClampedSwiGlued>, params, out);
}

void CudaOps::GeGlu(Tensor gate, Tensor up, Tensor out) {
  const ElementParams params = GatedParams(gate, up, out);
  if (Ready()) LaunchElements(*device_, PairKernel<Gated<GeluTanh>>, params, out);
}

void CudaOps::SigmoidGate(Tensor gate, Tensor x, Tensor out) {
  const bool of_rows = gate.cols == 1 && x.cols > 1;
  ElementParams params = GatedParams(of_rows ? x : gate, x, out);
  if (of_rows) params.a = MatrixOf(gate);
  const auto kernel = of_rows ? PairKernel<SigmoidGated, true> : PairKernel<SigmoidGated>;
  if (Ready()) LaunchElements(*device_, kernel, params, out);
}

void CudaOps::Multiply(Tensor x, Tensor y, Tensor out) {
  const ElementParams params = GatedParams(x, y, out);
  if (Ready()) LaunchElements(*device_, PairKernel<Gated<Unchanged>>, params, out);
}

void CudaOps::Gelu(Tensor x, Tensor out) {
  if (Ready()) Activate(*device_, FunctionKernel<GeluTanh>, x, out);
}

void CudaOps::GeluErf(Tensor x, Tensor out) {
  if (Ready()) Activate(*device_, FunctionKernel<ErfGelu>, x, out);
}

void CudaOps::Relu(Tensor x, Tensor out) {
  if (Ready()) Activate(*device_, FunctionKernel<Rectified>, x, out);
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

}  // namespace treadle::cuda
