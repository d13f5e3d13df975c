// Q4_0: f16 d, 16 bytes of nibbles; (q - 8) * d. Q4_1: f16 d, f16 m, 16 bytes of nibbles; q * d +
// m.
#pragma once

#include "kernels/formats/families.h"

namespace treadle::formats {

inline constexpr Codebook<16> kQ4_0Codebook =
    Tabulate<16>([](int code) { return static_cast<float>(code - 8); });

inline void Nibbles(const uint8_t* packed, int bias, int8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = static_cast<int8_t>((packed[i] & 15) - bias);
    codes[i + 16] = static_cast<int8_t>((packed[i] >> 4) - bias);
  }
}

inline void CodesQ4_0(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group * 18;
  out.scale = LoadHalf(block);
  out.offset = 0;
  Nibbles(Bytes(block + 2), 8, out.codes);
}

inline void CodesQ4_1(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group * 20;
  out.scale = LoadHalf(block);
  out.offset = LoadHalf(block + 2);
  Nibbles(Bytes(block + 4), 0, out.codes);
}

}  // namespace treadle::formats
