// Q5_0: f16 d, 4 bytes of fifth bits (bit j belongs to weight j), 16 bytes of nibbles; (q - 16) *
// d. Q5_1: f16 d, f16 m, then the same; q * d + m.
#pragma once

#include "kernels/formats/families.h"

namespace treadle::formats {

inline void FiveBits(const std::byte* high_bits, int bias, int8_t* codes) {
  uint32_t high;
  std::memcpy(&high, high_bits, sizeof(high));
  const uint8_t* packed = Bytes(high_bits + sizeof(high));
  for (int i = 0; i < 16; ++i) {
    const int first = (packed[i] & 15) | static_cast<int>((high >> i) & 1) << 4;
    const int second = (packed[i] >> 4) | static_cast<int>((high >> (i + 16)) & 1) << 4;
    codes[i] = static_cast<int8_t>(first - bias);
    codes[i + 16] = static_cast<int8_t>(second - bias);
  }
}

inline void CodesQ5_0(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group * 22;
  out.scale = LoadHalf(block);
  out.offset = 0;
  FiveBits(block + 2, 16, out.codes);
}

inline void CodesQ5_1(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group * 24;
  out.scale = LoadHalf(block);
  out.offset = LoadHalf(block + 2);
  FiveBits(block + 4, 0, out.codes);
}

}  // namespace treadle::formats
