// Integer scales of 6 bits, as blocks of 256 weights keep them (k_quants.h).
#pragma once

#include <cstdint>

namespace treadle::formats {

struct ScaleAndMinimum {
  int scale;
  int minimum;
};

// Pair `group` of 8 of Q4_K and Q5_K: the first four lie in the low six bits of bytes 0-3 and 4-7,
// the last four are put together from bytes 8-11 (low four bits) and the upper two bits of bytes
// 0-7.
inline ScaleAndMinimum SixBitPair(const uint8_t* packed, int64_t group) {
  if (group < 4) return {packed[group] & 63, packed[group + 4] & 63};
  return {(packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4,
          (packed[group + 4] >> 4) | (packed[group] >> 6) << 4};
}

// Scale `group` of 16 of Q3_K, less 32: four bits lie in bytes 0-7, low nibbles first, two in bytes
// 8-11.
inline int SixBitScale(const uint8_t* packed, int64_t group) {
  const int low = packed[group % 8] >> (group / 8 * 4) & 15;
  return (low | (packed[8 + group % 4] >> (group / 4 * 2) & 3) << 4) - 32;
}

// Scale `group` of 8 of a block of IQ4_XS, less 32: four bits lie in bytes 4-7, two in bytes 2-3.
inline int Iq4Scale(const uint8_t* block, int64_t group) {
  const int high = block[2 + group / 4] >> (group % 4 * 2) & 3;
  return ((block[4 + group / 2] >> (group % 2 * 4) & 15) | high << 4) - 32;
}

}  // namespace treadle::formats
