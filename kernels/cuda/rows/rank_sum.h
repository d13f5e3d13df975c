// The sum of an all-reduce: of parts that were gathered from all ranks, in rank order.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/device.h"

namespace treadle::cuda {

// out = parts[0] + parts[1] + ..., or out + (that sum). parts: [ranks][count], out: [count] f32 on
// the device, not overlapping. One fixed order whatever the place in the buffer (N1, N3).
void RankSum(Device& device, const float* parts, int ranks, int64_t count, bool accumulate,
             float* out);

}  // namespace treadle::cuda
