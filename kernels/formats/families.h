// Parts shared by headers of formats. They hold one function or one codebook per format (blocks.h,
// k_quants.h, codebooks.h), and only the table in weight_format.cc includes them. Private to this
// folder. Contracts: WeightFormat::decode and WeightFormat::codes.
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

static_assert(std::endian::native == std::endian::little, "checkpoints are little-endian");

inline float LoadHalf(const std::byte* data) {
  Half half;
  std::memcpy(&half.bits, data, sizeof(half.bits));
  return ToFloat(half);
}

inline const uint8_t* Bytes(const std::byte* data) {
  return reinterpret_cast<const uint8_t*>(data);
}

}  // namespace treadle::formats
