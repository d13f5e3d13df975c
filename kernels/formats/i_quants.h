// The I types of few bits, whose codes name points of grids (grids.h); ternary types; NVFP4. Blocks
// of 256 weights, but for NVFP4.
//   IQ2_XXS   f16 d; for 32 weights four bytes of points of 8 weights, 28 bits of signs, a scale
//   of 4. IQ2_XS    f16 d; 16 bits for 8 weights: 9 of a point, 7 of signs; 4-bit scales, one
//   for 16. IQ2_S     f16 d; bytes of points, bytes of signs, two more bits of each point; 4-bit
//   scales. IQ3_XXS   f16 d; bytes of points of 4 weights; signs and scales as IQ2_XXS has them.
//   IQ3_S     f16 d; bytes of points of 4 weights, a ninth bit of each, bytes of signs; 4-bit
//   scales. IQ1_S     f16 d; bytes of points; for 32 weights 16 bits: three more of each point, a
//   scale of 3,
//             and whether an eighth is added to a weight or taken off.
//   IQ1_M     bytes of points; for 8 weights four bits: three more of the point, and that of the
//             eighth; 3-bit scales, one for 16, above which d lies in four pieces.
//   TQ1_0     48 and 4 bytes of five and four digits of base 3, f16 d; d * (digit - 1).
//   TQ2_0     bit pairs, f16 d; d * (code - 1).
//   NVFP4     64 weights: 4 scales for 16 (a float of 8 bits, as E4M3 without a sign), nibbles as
//             MXFP4's.
#pragma once

#include "kernels/formats/blocks.h"
#include "kernels/formats/grids.h"
#include "kernels/formats/k_quants.h"

namespace treadle::formats {

// All codes of a format, the last of them repeated.
template <size_t kCodes>
constexpr Codebook<16> Sixteen(const int (&codes)[kCodes]) {
  Codebook<16> codebook = {};
  for (size_t i = 0; i < 16; ++i) {
    codebook.values[i] = static_cast<float>(codes[i < kCodes ? i : kCodes - 1]);
  }
  return codebook;
}
inline constexpr Codebook<16> kIq2Codebook = Sixteen({-43, -25, -8, 8, 25, 43});
inline constexpr Codebook<16> kIq3XxsCodebook =
    Sixteen({-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62});
inline constexpr Codebook<16> kIq3SCodebook =
    Sixteen({-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15});
inline constexpr Codebook<16> kIq1Codebook = Sixteen({-9, -7, -1, 1, 7, 9});
inline constexpr Codebook<16> kTq1Codebook = Sixteen({-1, 0, 1});
inline constexpr Codebook<16> kTq2Codebook = Sixteen({-1, 0, 1, 2});

template <typename T>
T LoadBits(const std::byte* data) {
  T bits;
  std::memcpy(&bits, data, sizeof(bits));
  return bits;
}
inline int NibbleAt(const std::byte* data, int64_t index) {
  return Bytes(data)[index / 2] >> (index % 2 * 4) & 15;
}

// The signs of 8 weights, of which 7 are stored: an even number is negative.
inline uint32_t EvenSigns(uint32_t seven) {
  seven &= 127;
  return seven | (static_cast<uint32_t>(std::popcount(seven)) & 1) << 7;
}
// A point, negative where `signs` has a bit. Returns the end of its codes.
template <typename Grid>
int8_t* PutPoint(const Grid& grid, uint32_t point, uint32_t signs, int8_t* codes) {
  for (int i = 0; i < Grid::kWidth; ++i) {
    const int8_t value = grid.points[point][i];
    *codes++ = static_cast<int8_t>((signs >> i & 1) != 0 ? -value : value);
  }
  return codes;
}
// d * (scale + 1/2) * factor
inline float HalfScale(const std::byte* block, uint32_t scale, float factor) {
  return LoadHalf(block) * (0.5f + static_cast<float>(scale)) * factor;
}

inline void CodesIQ2_XXS(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 8 * 66;
  const std::byte* points = block + 2 + group % 8 * 8;
  const auto rest = LoadBits<uint32_t>(points + 4);
  out.scale = HalfScale(block, rest >> 28, 0.25f);
  out.offset = 0;
  int8_t* codes = out.codes;
  for (int i = 0; i < 4; ++i) {
    codes = PutPoint(kIq2Xxs, Bytes(points)[i], EvenSigns(rest >> 7 * i), codes);
  }
}

inline void CodesIQ2_XS(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 16 * 74;
  group %= 16;
  out.scale = HalfScale(block, NibbleAt(block + 66, group), 0.25f);
  out.offset = 0;
  int8_t* codes = out.codes;
  for (int64_t i = 2 * group; i < 2 * group + 2; ++i) {
    const uint32_t bits = LoadBits<uint16_t>(block + 2 + 2 * i);
    codes = PutPoint(kIq2Xs, bits & 511, EvenSigns(bits >> 9), codes);
  }
}

inline void CodesIQ2_S(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 16 * 82;
  group %= 16;
  out.scale = HalfScale(block, NibbleAt(block + 74, group), 0.25f);
  out.offset = 0;
  int8_t* codes = out.codes;
  for (int64_t i = 2 * group; i < 2 * group + 2; ++i) {
    const uint32_t high = Bytes(block + 66)[i / 4] >> (i % 4 * 2) & 3;
    codes = PutPoint(kIq2S, Bytes(block + 2)[i] | high << 8, Bytes(block + 34)[i], codes);
  }
}

inline void CodesIQ3_XXS(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 8 * 98;
  group %= 8;
  const auto rest = LoadBits<uint32_t>(block + 66 + 4 * group);
  out.scale = HalfScale(block, rest >> 28, 0.5f);
  out.offset = 0;
  int8_t* codes = out.codes;
  for (int i = 0; i < 8; ++i) {
    const uint32_t signs = EvenSigns(rest >> i / 2 * 7) >> (i % 2 * 4);
    codes = PutPoint(kIq3Xxs, Bytes(block + 2)[8 * group + i], signs, codes);
  }
}

inline void CodesIQ3_S(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 8 * 110;
  group %= 8;
  out.scale = LoadHalf(block) * static_cast<float>(1 + 2 * NibbleAt(block + 106, group));
  out.offset = 0;
  int8_t* codes = out.codes;
  for (int64_t i = 0; i < 8; ++i) {
    const uint32_t ninth = Bytes(block + 66)[group] >> i & 1;
    const uint32_t signs = Bytes(block + 74)[4 * group + i / 2] >> (i % 2 * 4);
    codes = PutPoint(kIq3S, Bytes(block + 2)[8 * group + i] | ninth << 8, signs, codes);
  }
}

// Eight times the weights of a point to which an eighth is added, or from which it is taken off.
inline int8_t* PutEighths(uint32_t point, bool less, int8_t* codes) {
  for (const int8_t value : kIq1.points[point]) {
    *codes++ = static_cast<int8_t>(8 * value + (less ? -1 : 1));
  }
  return codes;
}

inline void CodesIQ1_S(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 8 * 50;
  group %= 8;
  const uint32_t high = LoadBits<uint16_t>(block + 34 + 2 * group);
  out.scale = LoadHalf(block) * static_cast<float>(2 * (high >> 12 & 7) + 1) * 0.125f;
  out.offset = 0;
  int8_t* codes = out.codes;
  for (int i = 0; i < 4; ++i) {
    const uint32_t point = Bytes(block + 2)[4 * group + i] | (high >> 3 * i & 7) << 8;
    codes = PutEighths(point, high >> 15 != 0, codes);
  }
}

inline void CodesIQ1_M(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 16 * 56;
  group %= 16;
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    d |= uint32_t{LoadBits<uint16_t>(block + 48 + 2 * i)} >> 12 << 4 * i;
  }
  const uint32_t scales = LoadBits<uint16_t>(block + 48 + group / 4 * 2);
  const Half half = {static_cast<uint16_t>(d)};
  out.scale = ToFloat(half) * static_cast<float>(2 * (scales >> group % 4 * 3 & 7) + 1) * 0.125f;
  out.offset = 0;
  int8_t* codes = out.codes;
  for (int64_t i = 2 * group; i < 2 * group + 2; ++i) {
    const auto high = static_cast<uint32_t>(NibbleAt(block + 32, i));
    codes = PutEighths(Bytes(block)[i] | (high & 7) << 8, (high & 8) != 0, codes);
  }
}

// The digits of a byte lie 32 weights apart, or 16, or 4: as digits after the point of a number
// below 1 in base 3, in units of 1/256.
inline int Ternary(uint8_t digits, int64_t digit) {
  constexpr uint8_t kPowers[] = {1, 3, 9, 27, 81};
  return static_cast<uint8_t>(digits * kPowers[digit]) * 3 >> 8;
}
inline void CodesTQ1_0(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 8 * 54;
  group %= 8;
  out.scale = LoadHalf(block + 52);
  out.offset = 0;
  for (int64_t i = 0; i < 32; ++i) {
    const int64_t weight = 32 * group + i;
    const int64_t at = weight < 160   ? weight % 32
                       : weight < 240 ? 32 + weight % 16
                                      : 48 + weight % 4;
    const int64_t digit = weight < 160   ? weight / 32
                          : weight < 240 ? (weight - 160) / 16
                                         : (weight - 240) / 4;
    out.codes[i] = static_cast<int8_t>(Ternary(Bytes(block)[at], digit) - 1);
  }
}

inline void CodesTQ2_0(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 8 * 66;
  out.scale = LoadHalf(block + 64);
  out.offset = 0;
  for (int i = 0; i < 32; ++i) {
    const int64_t first = group % 8 * 2 + i / 16;
    out.codes[i] = static_cast<int8_t>(TwoBits(Bytes(block), first, i % 16) - 1);
  }
}

// Half of a float of 4 bits of exponent and 3 of mantissa. The pattern of NaN counts as 0, as in
// ggml; the sign bit is not looked at.
inline float HalfOfUE4M3(uint8_t bits) {
  if (bits == 127) return 0;
  const int exponent = bits >> 3 & 15;
  const int mantissa = (bits & 7) + (exponent > 0 ? 8 : 0);
  return static_cast<float>(mantissa << (exponent > 0 ? exponent - 1 : 0)) * 0x1p-10f;
}
inline void CodesNVFP4(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 4 * 36;
  group %= 4;
  out.scale = HalfOfUE4M3(Bytes(block)[group]);
  out.offset = 0;
  for (int i = 0; i < 16; ++i) {
    const int nibble = Bytes(block + 4)[8 * group + i % 8] >> (i / 8 * 4) & 15;
    out.codes[i] = static_cast<int8_t>(kMXFP4Codebook.values[nibble]);
  }
}

}  // namespace treadle::formats
