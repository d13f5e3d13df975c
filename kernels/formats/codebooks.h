// The codebooks of apart formats. NF4 and FP4: bitsandbytes' values. int8: two's complement. E4M3:
// OCP's FP8, without infinities; S.1111.111 is NaN. GPTQ and AWQ: the code itself, less a zero
// point.
#pragma once

#include <limits>

#include "kernels/formats/families.h"

namespace treadle::formats {

// Bits 0-2 pick the magnitude, bit 3 the sign.
constexpr float Fp4(int code) {
  constexpr float kTwelfths[8] = {0, 0.0625f, 8, 12, 4, 6, 2, 3};
  const float magnitude = kTwelfths[code & 7] / 12;
  return code < 8 ? magnitude : -magnitude;
}

constexpr float TwosComplement(int code) {
  return static_cast<float>(code < 128 ? code : code - 256);
}

constexpr float E4M3(int code) {
  if ((code & 127) == 127) return std::numeric_limits<float>::quiet_NaN();
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  float value = 0x1p-9f * static_cast<float>(exponent == 0 ? mantissa : mantissa + 8);
  for (int e = 1; e < exponent; ++e) value *= 2;
  return code < 128 ? value : -value;
}

constexpr float Unsigned(int code) { return static_cast<float>(code); }

inline constexpr Codebook<16> kNf4Codebook = {
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
     -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
     0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
     0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f}};
inline constexpr Codebook<16> kFp4Codebook = Tabulate<16>(Fp4);
inline constexpr Codebook<256> kInt8Codebook = Tabulate<256>(TwosComplement);
inline constexpr Codebook<256> kE4M3Codebook = Tabulate<256>(E4M3);
inline constexpr Codebook<16> kUnsigned4Codebook = Tabulate<16>(Unsigned);
inline constexpr Codebook<256> kUnsigned8Codebook = Tabulate<256>(Unsigned);

}  // namespace treadle::formats
