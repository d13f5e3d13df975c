// SwiGLU and GELU, elementwise.
#include "kernels/cpu/isa_kernel.h"

namespace treadle {

TREADLE_ISA_KERNEL(SwiGluElements, void(const float* gate, const float* up, float* out, int64_t n));
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

void CpuOps::SwiGlu(Tensor gate, Tensor up, Tensor out) {
  CheckSameShape(gate, up);
  CheckSameShape(gate, out);
  SplitElements(pool_, gate.rows, gate.cols, [&](int64_t row, int64_t col, int64_t count) {
    kSwiGluElements[isa_](gate.Row<float>(row) + col, up.Row<float>(row) + col,
                          out.Row<float>(row) + col, count);
  });
}

void CpuOps::Gelu(Tensor x, Tensor out) {
  CheckSameShape(x, out);
  SplitElements(pool_, x.rows, x.cols, [&](int64_t row, int64_t col, int64_t count) {
    kGeluElements[isa_](x.Row<float>(row) + col, out.Row<float>(row) + col, count);
  });
}

}  // namespace treadle
#endif
