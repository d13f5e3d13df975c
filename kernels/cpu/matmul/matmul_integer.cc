// Products with quantized activations: which layout's kernel runs; Q4_0, Q4_1 and Q8_0.
#include "kernels/cpu/matmul/matmul_blocks.h"

namespace treadle::TREADLE_ISA {
namespace {

void Run(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
         int planes) {
  switch (share.weight.kind) {
    case PackKind::kQ4_0:
      return RunPlanes<Q4Layout<false>>(input, share, scratch, planes);
    case PackKind::kQ4_1:
      return RunPlanes<Q4Layout<true>>(input, share, scratch, planes);
    case PackKind::kQ8_0:
      return RunPlanes<Q8Layout>(input, share, scratch, planes);
    case PackKind::kQ5_0:
    case PackKind::kQ5_1:
      return MatMulQ5(input, share, scratch, planes);
    case PackKind::kQ4_K:
    case PackKind::kQ5_K:
    case PackKind::kQ6_K:
      return MatMulKQuants(input, share, scratch, planes);
    case PackKind::kCodes4:
    case PackKind::kCodes8:
    case PackKind::kIntegers8:
    case PackKind::kE4M3:
    case PackKind::kWords:
      return planes == 2 ? MatMulCodebook(input, share, scratch)
                         : MatMulExact(input, share, scratch);
    default:
      return MatMulExact(input, share, scratch);
  }
}

}  // namespace

void MatMulInt8(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  Run(input, share, scratch, 1);
}
void MatMulInt16(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  Run(input, share, scratch, 2);
}

}  // namespace treadle::TREADLE_ISA
