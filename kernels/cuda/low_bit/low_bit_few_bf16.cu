#include "kernels/cuda/low_bit/low_bit_few_kernel.h"

namespace treadle::cuda {

FewRowsFunction FewRowsBf16(const LowBitView& w, bool one_tile) {
  return low_bit::FindFewRows<true>(w, one_tile);
}

}  // namespace treadle::cuda
