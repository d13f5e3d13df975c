// Elements of a K/V cache as the device reads and writes them.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/simt.h"
#include "kernels/dtype.h"

namespace treadle::cuda {

// f32, f16 (finite values saturate) and bf16, rounded half to even.
template <DType kType>
struct KvElement {
  static_assert(kType == DType::kF32 || kType == DType::kF16 || kType == DType::kBF16);
  using Stored = uint16_t;
  TREADLE_DEVICE static float Load(Stored x) {
    if constexpr (kType == DType::kF16) {
      return simt::FromF16(x);
    } else {
      return simt::FromBf16(x);
    }
  }
  TREADLE_DEVICE static Stored Store(float x) {
    if constexpr (kType == DType::kF16) {
      return simt::ToF16(x);
    } else {
      return simt::ToBf16(x);
    }
  }
};
template <>
struct KvElement<DType::kF32> {
  using Stored = float;
  TREADLE_DEVICE static float Load(float x) { return x; }
  TREADLE_DEVICE static float Store(float x) { return x; }
};

}  // namespace treadle::cuda
