#include "kernels/cuda/low_bit_few_kernel.h"

namespace treadle::cuda {

FewRowsFunction FewRowsBf16(const LowBitView& w, FewRowsX x) {
  return low_bit::FindFewRows<true>(w, x);
}

}  // namespace treadle::cuda
