// MXFP4 (OCP's microscaling formats): a power of two of 8 bits (E8M0), 16 bytes of nibbles, each a
// float of four bits (E2M1). As ggml has it: twice the E2M1 value, which is an integer, times half
// the power; and the pattern that OCP calls NaN, 255, is the power after 254's.
#pragma once

#include "kernels/formats/families.h"

namespace treadle::formats {

inline constexpr Codebook<16> kMXFP4Codebook = {
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};

// 2^(exponent - 128); the first two are subnormal.
inline float HalfOfE8M0(uint32_t exponent) {
  return std::bit_cast<float>(exponent < 2 ? 0x200000u << exponent : (exponent - 1) << 23);
}

inline void CodesMXFP4(const std::byte* data, int64_t group, CodeGroup& out) {
  const uint8_t* block = Bytes(data + group * 17);
  out.scale = HalfOfE8M0(block[0]);
  out.offset = 0;
  LookUpNibbles(block + 1, kMXFP4Codebook, out.codes);
}

}  // namespace treadle::formats
