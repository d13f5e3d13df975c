// Sampling's passes over (part of) a row of logits. NaN counts as -inf, +inf as the largest float.
#pragma once

#include "kernels/cpu/isa_kernel.h"

namespace treadle {

// Largest of x[0, n); -inf if none.
TREADLE_ISA_KERNEL(MaxLogit, float(const float* x, int64_t n));
// Lowest i >= from with x[i] >= floor, or -1.
TREADLE_ISA_KERNEL(FirstAtLeast, int64_t(const float* x, int64_t from, int64_t n, float floor));
// Sum of exp((x[i] - max) * factor) over x[0, n); meant for n of at most about a thousand.
TREADLE_ISA_KERNEL(SumExp, float(const float* x, int64_t n, float max, float factor));
// Every i with floor <= x[i] < ceiling, ascending, to ids, and exp((x[i] - max) * factor) to
// weights. Room for n + 16 of each. Returns how many.
TREADLE_ISA_KERNEL(GatherBand, int64_t(const float* x, int64_t n, float floor, float ceiling,
                                       float max, float factor, int32_t* ids, float* weights));

}  // namespace treadle
