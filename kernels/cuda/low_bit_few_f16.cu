#include "kernels/cuda/low_bit_few_kernel.h"

namespace treadle::cuda {

FewRowsFunction FewRowsF16(const LowBitView& w, FewRowsX x) {
  return low_bit::FindFewRows<false>(w, x);
}

}  // namespace treadle::cuda
