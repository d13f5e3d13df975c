// IQ4_NL: f16 d, 16 bytes of nibbles; d times one of sixteen integers, which lie denser around 0.
#pragma once

#include "kernels/formats/families.h"

namespace treadle::formats {

inline constexpr Codebook<16> kIQ4_NLCodebook = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};

inline void CodesIQ4_NL(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group * 18;
  out.scale = LoadHalf(block);
  out.offset = 0;
  LookUpNibbles(Bytes(block + 2), kIQ4_NLCodebook, out.codes);
}

}  // namespace treadle::formats
