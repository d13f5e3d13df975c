// Attention over caches that the tensor-core kernels do not take: K/V of f32, head sizes that are
// no multiple of 8 or above 256. One warp for each (row, query head), plain f32 arithmetic, the
// same blocks; right, not fast.
#pragma once

#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/dtype.h"

namespace treadle::cuda {

void LaunchGeneralAttention(Device& device, DType kv_type, const AttentionParams& p);

}  // namespace treadle::cuda
