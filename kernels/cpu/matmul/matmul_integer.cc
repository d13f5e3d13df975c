// Products with quantized activations: which layout's kernel runs.
#include "kernels/cpu/matmul/matmul_blocks.h"

namespace treadle::TREADLE_ISA {
namespace {

template <int kPlanes>
void Run(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  if (WithBlockLayout(share.weight.kind, [&]<typename Layout>() {
        RunPlanes<Layout, kPlanes>(input, share, scratch);
      })) {
    return;
  }
  const bool codes = kPlanes == 2 && HasCodes(share.weight.kind);
  codes ? MatMulCodebook(input, share, scratch) : MatMulExact(input, share, scratch);
}

}  // namespace

void MatMulInt8(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  Run<1>(input, share, scratch);
}
void MatMulInt16(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  Run<2>(input, share, scratch);
}

}  // namespace treadle::TREADLE_ISA
