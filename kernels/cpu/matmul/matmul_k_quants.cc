// Products of the K types with quantized activations.
#include "kernels/cpu/matmul/matmul_blocks.h"

namespace treadle::TREADLE_ISA {

void MatMulKQuants(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
                   int planes) {
  if (share.weight.kind == PackKind::kQ4_K) {
    RunPlanes<Q4KLayout>(input, share, scratch, planes);
  } else if (share.weight.kind == PackKind::kQ5_K) {
    RunPlanes<Q5KLayout>(input, share, scratch, planes);
  } else {
    RunPlanes<Q6KLayout>(input, share, scratch, planes);
  }
}

}  // namespace treadle::TREADLE_ISA
