// Blocks of 32 weights: f16 d (and f16 m), then codes of four, five or eight bits.
//   Q4_0, Q4_1   16 bytes of nibbles; (q - 8) * d, and q * d + m.
//   Q5_0, Q5_1   4 bytes of fifth bits (bit j belongs to weight j), 16 bytes of nibbles; (q - 16) *
//                d, and q * d + m.
//   Q8_0         32 signed bytes; q * d.
//   IQ4_NL       16 bytes of nibbles; d times one of sixteen integers, which lie denser around 0.
//   MXFP4        OCP's microscaling formats: a power of two of 8 bits (E8M0) instead of d, 16 bytes
//                of nibbles, each a float of four bits (E2M1). As ggml has it: twice the E2M1
//                value, which is an integer, times half the power; and the pattern that OCP calls
//                NaN, 255, is the power after 254's.
#pragma once

#include "kernels/formats/families.h"

namespace treadle::formats {

inline constexpr Codebook<16> kQ4_0Codebook =
    Tabulate<16>([](int code) { return static_cast<float>(code - 8); });
inline constexpr Codebook<16> kIQ4_NLCodebook = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
// All codes of Q2_K and Q3_K (k_quants.h), the last of them repeated.
inline constexpr Codebook<16> kQ2_KCodebook =
    Tabulate<16>([](int code) { return static_cast<float>(code < 3 ? code : 3); });
inline constexpr Codebook<16> kQ3_KCodebook =
    Tabulate<16>([](int code) { return static_cast<float>((code < 7 ? code : 7) - 4); });
inline constexpr Codebook<16> kMXFP4Codebook = {
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};

// Sets d and m of the block; what comes behind them.
template <bool kMinimum>
const uint8_t* Constants(const std::byte* block, CodeGroup& out) {
  out.scale = LoadHalf(block);
  out.offset = kMinimum ? LoadHalf(block + 2) : 0;
  return Bytes(block + (kMinimum ? 4 : 2));
}

inline void Nibbles(const uint8_t* packed, int bias, int8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = static_cast<int8_t>((packed[i] & 15) - bias);
    codes[i + 16] = static_cast<int8_t>((packed[i] >> 4) - bias);
  }
}

// The integers of 32 nibbles.
inline void LookUpNibbles(const uint8_t* packed, const Codebook<16>& codebook, int8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = static_cast<int8_t>(codebook.values[packed[i] & 15]);
    codes[i + 16] = static_cast<int8_t>(codebook.values[packed[i] >> 4]);
  }
}

// high_bits: four bytes, before the nibbles.
inline void FiveBits(const uint8_t* high_bits, int bias, int8_t* codes) {
  uint32_t high;
  std::memcpy(&high, high_bits, sizeof(high));
  const uint8_t* packed = high_bits + sizeof(high);
  for (int i = 0; i < 16; ++i) {
    const int first = (packed[i] & 15) | static_cast<int>((high >> i) & 1) << 4;
    const int second = (packed[i] >> 4) | static_cast<int>((high >> (i + 16)) & 1) << 4;
    codes[i] = static_cast<int8_t>(first - bias);
    codes[i + 16] = static_cast<int8_t>(second - bias);
  }
}

inline void CodesQ4_0(const std::byte* data, int64_t group, CodeGroup& out) {
  Nibbles(Constants<false>(data + group * 18, out), 8, out.codes);
}
inline void CodesQ4_1(const std::byte* data, int64_t group, CodeGroup& out) {
  Nibbles(Constants<true>(data + group * 20, out), 0, out.codes);
}
inline void CodesQ5_0(const std::byte* data, int64_t group, CodeGroup& out) {
  FiveBits(Constants<false>(data + group * 22, out), 16, out.codes);
}
inline void CodesQ5_1(const std::byte* data, int64_t group, CodeGroup& out) {
  FiveBits(Constants<true>(data + group * 24, out), 0, out.codes);
}
inline void CodesQ8_0(const std::byte* data, int64_t group, CodeGroup& out) {
  std::memcpy(out.codes, Constants<false>(data + group * 34, out), 32);
}
inline void CodesIQ4_NL(const std::byte* data, int64_t group, CodeGroup& out) {
  LookUpNibbles(Constants<false>(data + group * 18, out), kIQ4_NLCodebook, out.codes);
}

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
