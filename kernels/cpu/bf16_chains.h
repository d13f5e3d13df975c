// bf16 factors without the instructions for them, and sums of their products as AMX makes them: of
// each 32 terms, the even ones are a chain of fma from 0, and the odd ones another; their sum is
// added to what is there. Subnormal numbers count as zeros, before and after every step (Intel 64
// and IA-32 Architectures Software Developer's Manual, TDPBF16PS).
//
// Only for sources that are compiled once per instruction set; see simd.h.
#pragma once

#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

inline constexpr int64_t kChainTerms = 32;

// While it lives, subnormal operands and results are zeros.
class ScopedFlush {
 public:
  TREADLE_SIMD ScopedFlush() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  TREADLE_SIMD ~ScopedFlush() { _mm_setcsr(before_); }
  ScopedFlush(const ScopedFlush&) = delete;
  ScopedFlush& operator=(const ScopedFlush&) = delete;

 private:
  const unsigned before_;
};

// Half to even, as VCVTNEPS2BF16 does: subnormal numbers become zeros, and NaN a quiet one.
TREADLE_SIMD float RoundToBf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude < 0x00800000u) {
    bits &= 0x80000000u;
  } else if (magnitude > 0x7f800000u) {
    bits = (bits & 0xffff0000u) | 0x00400000u;
  } else {
    bits = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  }
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
TREADLE_SIMD void RoundToBf16(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = RoundToBf16(x[i]);
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
