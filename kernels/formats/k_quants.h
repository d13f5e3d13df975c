// The K types: blocks of 256 weights, whose groups have integer scales of their own.
//   Q4_K: f16 d, f16 dmin, 12 bytes of 6-bit (sc, m) pairs, 128 bytes of nibbles; d*sc*q - dmin*m.
//   Q5_K: the same, with 32 bytes of fifth bits before the nibbles (bit g of byte l: group g).
//   Q6_K: 128 bytes of low nibbles, 64 bytes of high pairs, 16 signed scales, f16 d; d*sc*(q - 32).
#pragma once

#include "kernels/formats/families.h"

namespace treadle::formats {

struct ScaleAndMinimum {
  int scale;
  int minimum;
};

// Pair `group` of 8: the first four lie in the low six bits of bytes 0-3 and 4-7, the last four are
// put together from bytes 8-11 (low four bits) and the upper two bits of bytes 0-7.
inline ScaleAndMinimum SixBitPair(const uint8_t* packed, int64_t group) {
  if (group < 4) return {packed[group] & 63, packed[group + 4] & 63};
  return {(packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4,
          (packed[group + 4] >> 4) | (packed[group] >> 6) << 4};
}

inline void ScaleAndOffset(const std::byte* block, int64_t group, CodeGroup& out) {
  const ScaleAndMinimum pair = SixBitPair(Bytes(block + 4), group);
  out.scale = LoadHalf(block) * static_cast<float>(pair.scale);
  out.offset = -(LoadHalf(block + 2) * static_cast<float>(pair.minimum));
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

}  // namespace treadle::formats
