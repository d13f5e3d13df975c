// The K types: blocks of 256 weights, whose groups have integer scales of their own.
//   Q2_K: 16 bytes of 4-bit (sc, m) pairs, 64 bytes of 2-bit codes, f16 d, f16 dmin; d*sc*q -
//   dmin*m. Q3_K: 32 bytes of third bits, 64 bytes of 2-bit codes, 12 bytes of 6-bit scales, f16 d;
//         d*(sc - 32)*(q - 4).
//   Q4_K: f16 d, f16 dmin, 12 bytes of 6-bit (sc, m) pairs, 128 bytes of nibbles; d*sc*q - dmin*m.
//   Q5_K: the same, with 32 bytes of fifth bits before the nibbles (bit g of byte l: group g).
//   Q6_K: 128 bytes of low nibbles, 64 bytes of high pairs, 16 signed scales, f16 d; d*sc*(q - 32).
#pragma once

#include "kernels/formats/blocks.h"
#include "kernels/formats/k_scales.h"

namespace treadle::formats {

inline void ScaleAndOffset(const std::byte* block, int64_t group, CodeGroup& out) {
  const ScaleAndMinimum pair = SixBitPair(Bytes(block + 4), group);
  out.scale = LoadHalf(block) * static_cast<float>(pair.scale);
  out.offset = 0.0f - LoadHalf(block + 2) * static_cast<float>(pair.minimum);
}

// Groups 2c and 2c + 1 are the low and the high nibbles of bytes 32c .. 32c + 31.
inline int Nibble(const uint8_t* packed, int64_t group, int i) {
  return (packed[group / 2 * 32 + i] >> (group % 2 * 4)) & 15;
}

inline void CodesQ4_K(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 8 * 144;
  group %= 8;
  ScaleAndOffset(block, group, out);
  const uint8_t* packed = Bytes(block + 16);
  for (int i = 0; i < 32; ++i) out.codes[i] = static_cast<int8_t>(Nibble(packed, group, i));
}

inline void CodesQ5_K(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 8 * 176;
  group %= 8;
  ScaleAndOffset(block, group, out);
  const uint8_t* high = Bytes(block + 16);
  const uint8_t* packed = Bytes(block + 48);
  for (int i = 0; i < 32; ++i) {
    out.codes[i] = static_cast<int8_t>(Nibble(packed, group, i) | ((high[i] >> group) & 1) << 4);
  }
}

// A half block of 128 weights has four quarters of 32: quarter j takes its low bits from nibble j /
// 2 of bytes 32 * (j % 2) .., its high pair from bits 2j of the half's 32 bytes. A group is half a
// quarter.
inline void CodesQ6_K(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 16 * 210;
  group %= 16;
  const int64_t half = group / 8;
  const int64_t quarter = group / 2 % 4;
  const int64_t first = group % 2 * 16;
  const uint8_t* low = Bytes(block) + half * 64 + quarter % 2 * 32 + first;
  const uint8_t* high = Bytes(block) + 128 + half * 32 + first;
  const int scale = static_cast<int8_t>(Bytes(block)[192 + group]);
  out.scale = LoadHalf(block + 208) * static_cast<float>(scale);
  out.offset = 0;
  for (int i = 0; i < 16; ++i) {
    const int code = ((low[i] >> (quarter / 2 * 4)) & 15) | ((high[i] >> (2 * quarter)) & 3) << 4;
    out.codes[i] = static_cast<int8_t>(code - 32);
  }
}

// The 2-bit codes of group `group` of 16, each shifted down to bit 0: eight groups share 32 bytes,
// two of them a pair of bits.
inline int TwoBits(const uint8_t* packed, int64_t group, int i) {
  return (packed[group / 8 * 32 + group % 2 * 16 + i] >> (group / 2 % 4 * 2)) & 3;
}

inline void CodesQ2_K(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 16 * 84;
  group %= 16;
  const int pair = Bytes(block)[group];
  out.scale = LoadHalf(block + 80) * static_cast<float>(pair & 15);
  out.offset = 0.0f - LoadHalf(block + 82) * static_cast<float>(pair >> 4);  // a zero is positive
  for (int i = 0; i < 16; ++i) {
    out.codes[i] = static_cast<int8_t>(TwoBits(Bytes(block + 16), group, i));
  }
}

inline void CodesQ3_K(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 16 * 110;
  group %= 16;
  out.scale = LoadHalf(block + 108) * static_cast<float>(SixBitScale(Bytes(block + 96), group));
  out.offset = 0;
  const uint8_t* high = Bytes(block) + group % 2 * 16;
  for (int i = 0; i < 16; ++i) {
    const int third = high[i] >> (group / 2) & 1;
    out.codes[i] = static_cast<int8_t>(TwoBits(Bytes(block + 32), group, i) + 4 * third - 4);
  }
}

// IQ4_XS is IQ4_NL (blocks.h) in blocks of 256: f16 d, 16 bits of upper pairs of scales, 4 bytes of
// their nibbles, 128 bytes of codes; d*(sc - 32)*value.
inline void CodesIQ4_XS(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group / 8 * 136;
  group %= 8;
  out.scale = LoadHalf(block) * static_cast<float>(Iq4Scale(Bytes(block), group));
  out.offset = 0;
  LookUpNibbles(Bytes(block + 8) + group * 16, kIQ4_NLCodebook, out.codes);
}

}  // namespace treadle::formats
