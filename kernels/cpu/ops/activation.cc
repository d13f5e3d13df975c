// SwiGLU, GeGLU and GELU, elementwise.
#include "kernels/cpu/isa_kernel.h"

namespace treadle {

TREADLE_ISA_KERNEL(SwiGluElements, void(const float* gate, const float* up, float* out, int64_t n));
TREADLE_ISA_KERNEL(GeGluElements, void(const float* gate, const float* up, float* out, int64_t n));
TREADLE_ISA_KERNEL(GeluElements, void(const float* x, float* out, int64_t n));

}  // namespace treadle

#ifdef TREADLE_ISA
#include "kernels/cpu/vector_math.h"

namespace treadle::TREADLE_ISA {

void SwiGluElements(const float* gate, const float* up, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, Mul(Silu(LoadLanes(gate + i, lanes)), LoadLanes(up + i, lanes)), lanes);
  });
}

void GeGluElements(const float* gate, const float* up, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, Mul(GeluTanh(LoadLanes(gate + i, lanes)), LoadLanes(up + i, lanes)), lanes);
  });
}

void GeluElements(const float* x, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, GeluTanh(LoadLanes(x + i, lanes)), lanes);
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

}  // namespace

void CpuOps::SwiGlu(Tensor gate, Tensor up, Tensor out) {
  Gated(pool_, kSwiGluElements[isa_], gate, up, out);
}

void CpuOps::GeGlu(Tensor gate, Tensor up, Tensor out) {
  Gated(pool_, kGeGluElements[isa_], gate, up, out);
}

void CpuOps::Gelu(Tensor x, Tensor out) {
  CheckSameShape(x, out);
  SplitElements(pool_, x.rows, x.cols, [&](int64_t row, int64_t col, int64_t count) {
    kGeluElements[isa_](x.Row<float>(row) + col, out.Row<float>(row) + col, count);
  });
}

}  // namespace treadle
#endif
