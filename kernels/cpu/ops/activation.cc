// Both SwiGLUs, GeGLU, the sigmoid gate, products, both GELUs, ReLU, xIELU and the bound of logits,
// elementwise.
#include "kernels/backend.h"
#include "kernels/cpu/isa_kernel.h"

namespace treadle {

TREADLE_ISA_KERNEL(SwiGluElements, void(const float* gate, const float* up, float* out, int64_t n));
TREADLE_ISA_KERNEL(ClampedSwiGluElements,
                   void(const float* gate, const float* up, float limit, float* out, int64_t n));
TREADLE_ISA_KERNEL(GeGluElements, void(const float* gate, const float* up, float* out, int64_t n));
// gates: one of each x, or one of all.
TREADLE_ISA_KERNEL(SigmoidGateElements,
                   void(const float* gate, int64_t gates, const float* x, float* out, int64_t n));
TREADLE_ISA_KERNEL(MultiplyElements, void(const float* x, const float* y, float* out, int64_t n));
TREADLE_ISA_KERNEL(GeluElements, void(const float* x, float* out, int64_t n));
TREADLE_ISA_KERNEL(GeluErfElements, void(const float* x, float* out, int64_t n));
TREADLE_ISA_KERNEL(ReluElements, void(const float* x, float* out, int64_t n));
TREADLE_ISA_KERNEL(SoftCapElements, void(const float* x, float cap, float* out, int64_t n));
TREADLE_ISA_KERNEL(XieluElements,
                   void(const float* x, const XieluScales& s, float* out, int64_t n));

}  // namespace treadle

#ifdef TREADLE_ISA
#include "kernels/cpu/vector_math.h"

namespace treadle::TREADLE_ISA {

void SwiGluElements(const float* gate, const float* up, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, Mul(Silu(LoadLanes(gate + i, lanes)), LoadLanes(up + i, lanes)), lanes);
  });
}

void ClampedSwiGluElements(const float* gate, const float* up, float limit, float* out, int64_t n) {
  const Vec most = Broadcast(limit), least = Broadcast(-limit), one = Broadcast(1.0f);
  ForEachVec(n, [&](int64_t i, int64_t lanes) {  // NaN stays what it is
    const Vec x = Min(most, LoadLanes(gate + i, lanes));
    const Vec more = Max(least, Min(most, LoadLanes(up + i, lanes)));
    const Vec swish = TimesSigmoid(x, Mul(Broadcast(1.702f), x));
    StoreLanes(out + i, Mul(Add(more, one), swish), lanes);
  });
}

void GeGluElements(const float* gate, const float* up, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, Mul(GeluTanh(LoadLanes(gate + i, lanes)), LoadLanes(up + i, lanes)), lanes);
  });
}

void SigmoidGateElements(const float* gate, int64_t gates, const float* x, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    const Vec by = gates == 1 ? Broadcast(*gate) : LoadLanes(gate + i, lanes);
    StoreLanes(out + i, TimesSigmoid(LoadLanes(x + i, lanes), by), lanes);
  });
}

void MultiplyElements(const float* x, const float* y, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, Mul(LoadLanes(x + i, lanes), LoadLanes(y + i, lanes)), lanes);
  });
}

void GeluElements(const float* x, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, GeluTanh(LoadLanes(x + i, lanes)), lanes);
  });
}

void GeluErfElements(const float* x, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, GeluErf(LoadLanes(x + i, lanes)), lanes);
  });
}

void ReluElements(const float* x, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, Max(LoadLanes(x + i, lanes), Zero()), lanes);
  });
}

// tanh(y) = expm1(2 y) / (expm1(2 y) + 2), of -|y|, where nothing overflows.
void SoftCapElements(const float* x, float cap, float* out, int64_t n) {
  const Vec scale = Broadcast(2 / cap), two = Broadcast(2.0f);
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    const Vec value = LoadLanes(x + i, lanes), minus = Sub(Zero(), value);
    const Vec power = Expm1(Mul(Min(value, minus), scale));
    const Vec less = Mul(Broadcast(cap), Div(power, Add(power, two)));  // for -|x|
    StoreLanes(out + i, Select(Less(Zero(), value), Sub(Zero(), less), less), lanes);
  });
}

void XieluElements(const float* x, const XieluScales& s, float* out, int64_t n) {
  const Vec positive = Broadcast(s.positive), negative = Broadcast(s.negative);
  const Vec slope = Broadcast(s.slope), largest = Broadcast(s.largest);
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    const Vec value = LoadLanes(x + i, lanes);
    const Vec line = Mul(slope, value);
    const Vec above = Fma(positive, Mul(value, value), line);
    const Vec below = Fma(negative, Sub(Expm1(Min(largest, value)), value), line);
    StoreLanes(out + i, Select(Less(Zero(), value), above, below), lanes);
  });
}

}  // namespace treadle::TREADLE_ISA
#else
#include "kernels/cpu/ops/cpu_ops.h"
#include "kernels/cpu/ops/split_rows.h"

namespace treadle {

namespace {

template <typename Kernel>
void Gated(ThreadPool& pool, Kernel kernel, const Tensor& gate, const Tensor& up,
           const Tensor& out) {
  CheckSameShape(gate, up);
  CheckSameShape(gate, out);
  SplitElements(pool, gate.rows, gate.cols, [&](int64_t row, int64_t col, int64_t count) {
    kernel(gate.Row<float>(row) + col, up.Row<float>(row) + col, out.Row<float>(row) + col, count);
  });
}

template <typename Kernel>
void Elementwise(ThreadPool& pool, Kernel kernel, const Tensor& x, const Tensor& out) {
  CheckSameShape(x, out);
  SplitElements(pool, x.rows, x.cols, [&](int64_t row, int64_t col, int64_t count) {
    kernel(x.Row<float>(row) + col, out.Row<float>(row) + col, count);
  });
}

}  // namespace

void CpuOps::SwiGlu(Tensor gate, Tensor up, Tensor out) {
  Gated(pool_, kSwiGluElements[isa_], gate, up, out);
}
void CpuOps::ClampedSwiGlu(Tensor gate, Tensor up, float limit, Tensor out) {
  const auto clamped = [&](const float* g, const float* u, float* to, int64_t n) {
    kClampedSwiGluElements[isa_](g, u, limit, to, n);
  };
  Gated(pool_, clamped, gate, up, out);
}
void CpuOps::GeGlu(Tensor gate, Tensor up, Tensor out) {
  Gated(pool_, kGeGluElements[isa_], gate, up, out);
}
void CpuOps::GatedMatMul(Tensor x, std::span<const Projection> pairs, Gate by, Tensor gate,
                         Tensor up, Tensor out) {
  matmul_.RunGated(x, pairs, by == Gate::kSwiGlu ? kSwiGluElements[isa_] : kGeGluElements[isa_],
                   out);
}
void CpuOps::SigmoidGate(Tensor gate, Tensor x, Tensor out) {
  CheckSameShape(x, out);
  TREADLE_CHECK(gate.rows == x.rows && (gate.cols == x.cols || gate.cols == 1));
  SplitElements(pool_, x.rows, x.cols, [&](int64_t row, int64_t col, int64_t count) {
    kSigmoidGateElements[isa_](gate.Row<float>(row) + (gate.cols == 1 ? 0 : col), gate.cols,
                               x.Row<float>(row) + col, out.Row<float>(row) + col, count);
  });
}
void CpuOps::Multiply(Tensor x, Tensor y, Tensor out) {
  Gated(pool_, kMultiplyElements[isa_], x, y, out);
}
void CpuOps::Gelu(Tensor x, Tensor out) { Elementwise(pool_, kGeluElements[isa_], x, out); }
void CpuOps::GeluErf(Tensor x, Tensor out) { Elementwise(pool_, kGeluErfElements[isa_], x, out); }
void CpuOps::Relu(Tensor x, Tensor out) { Elementwise(pool_, kReluElements[isa_], x, out); }
void CpuOps::SoftCap(Tensor x, float cap, Tensor out) {
  const auto capped = [&](const float* from, float* to, int64_t n) {
    kSoftCapElements[isa_](from, cap, to, n);
  };
  Elementwise(pool_, capped, x, out);
}
void CpuOps::Xielu(Tensor x, const XieluScales& s, Tensor out) {
  const auto scaled = [&](const float* from, float* to, int64_t n) {
    kXieluElements[isa_](from, s, to, n);
  };
  Elementwise(pool_, scaled, x, out);
}

}  // namespace treadle
#endif
