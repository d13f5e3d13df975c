// bf16 as AMX multiplies it (ComputeMode::kBf16).
#pragma once

#include <cmath>

#include "kernels/dtype.h"

namespace treadle {

// Half to even; subnormal numbers become zeros.
inline BFloat16 ToNormalBFloat16(float x) {
  return std::fabs(x) < 0x1p-126f ? BFloat16{} : ToBFloat16(x);
}

}  // namespace treadle
