// SwiGLU and GELU, elementwise.
#include "kernels/cpu/isa_kernels.h"
#include "kernels/cpu/vector_math.h"

namespace treadle::TREADLE_ISA {

void SwiGlu(const float* gate, const float* up, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, Mul(Silu(LoadLanes(gate + i, lanes)), LoadLanes(up + i, lanes)), lanes);
  });
}

void Gelu(const float* x, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, GeluTanh(LoadLanes(x + i, lanes)), lanes);
  });
}

void ExpInto(const float* x, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, Exp(LoadLanes(x + i, lanes)), lanes);
  });
}

}  // namespace treadle::TREADLE_ISA
