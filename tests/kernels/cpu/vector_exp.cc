// The vector kernels' exp as a function of its own.
#include "kernels/cpu/isa_kernel.h"
#include "kernels/cpu/vector_math.h"

namespace treadle {

TREADLE_ISA_KERNEL(ExpElements, void(const float* x, float* out, int64_t n));

namespace TREADLE_ISA {

void ExpElements(const float* x, float* out, int64_t n) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(out + i, Exp(LoadLanes(x + i, lanes)), lanes);
  });
}

}  // namespace TREADLE_ISA
}  // namespace treadle
