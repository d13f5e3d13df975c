// What the table in weight_format.cc is made of: one function or one codebook per format. Blocks
// have a header for each family, which only the table includes. Private to this folder. Contracts:
// WeightFormat::decode and WeightFormat::codes.
//
// Layouts are ggml's (GGUF v3): little-endian, a block's constants in 16-bit floats. 4-bit codes
// lie two in a byte; in a run of 2h codes the low nibbles are the first h, the high nibbles the
// last h.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/dtype.h"
#include "kernels/formats/weight_format.h"

namespace treadle::formats {

// dense.cc
void DecodeF32(const std::byte* data, int64_t count, float* out);
void DecodeF16(const std::byte* data, int64_t count, float* out);
void DecodeBF16(const std::byte* data, int64_t count, float* out);
// codebooks.cc
template <int kCodes>
struct Codebook {
  float values[kCodes];
};
template <int kCodes>
constexpr Codebook<kCodes> Tabulate(float (*value)(int code)) {
  Codebook<kCodes> codebook = {};
  for (int code = 0; code < kCodes; ++code) codebook.values[code] = value(code);
  return codebook;
}
extern const Codebook<16> kNf4Codebook;
extern const Codebook<16> kFp4Codebook;
extern const Codebook<256> kInt8Codebook;
extern const Codebook<256> kE4M3Codebook;
extern const Codebook<16> kUnsigned4Codebook;
extern const Codebook<256> kUnsigned8Codebook;

static_assert(std::endian::native == std::endian::little, "checkpoints are little-endian");

inline float LoadHalf(const std::byte* data) {
  Half half;
  std::memcpy(&half.bits, data, sizeof(half.bits));
  return ToFloat(half);
}

inline const uint8_t* Bytes(const std::byte* data) {
  return reinterpret_cast<const uint8_t*>(data);
}

// The integers of 32 nibbles.
inline void LookUpNibbles(const uint8_t* packed, const Codebook<16>& codebook, int8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = static_cast<int8_t>(codebook.values[packed[i] & 15]);
    codes[i + 16] = static_cast<int8_t>(codebook.values[packed[i] >> 4]);
  }
}

}  // namespace treadle::formats
