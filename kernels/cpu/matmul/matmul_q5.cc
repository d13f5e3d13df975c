// Products of Q5_0 and Q5_1 with quantized activations.
#include "kernels/cpu/matmul/matmul_blocks.h"

namespace treadle::TREADLE_ISA {

void MatMulQ5(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
              int planes) {
  if (share.weight.kind == PackKind::kQ5_0) {
    RunPlanes<Q5Layout<false>>(input, share, scratch, planes);
  } else {
    RunPlanes<Q5Layout<true>>(input, share, scratch, planes);
  }
}

}  // namespace treadle::TREADLE_ISA
