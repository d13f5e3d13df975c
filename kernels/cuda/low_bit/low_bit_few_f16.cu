// The few-rows kernels for f16 activations.
#include "kernels/cuda/low_bit/low_bit_few_kernel.h"

template treadle::cuda::FewRowsFunction treadle::cuda::low_bit::FindFewRows<false>(
    const treadle::cuda::LowBitView&, bool);
