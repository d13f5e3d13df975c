// Splits work over threads that live for one call: for loading and converting, which are rare.
//
// Thread safety: what it returns may be called from any thread.
#pragma once

#include "kernels/formats/quantize.h"

namespace treadle {

// 0: one thread per CPU of this process.
ParallelFor SplitOverThreads(int threads);

}  // namespace treadle
