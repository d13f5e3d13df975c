// 8-bit codes with one scale per row: LLM.int8() as bitsandbytes quantizes weights (Dettmers,
// chapter 2), and FP8 E4M3.
#include <bit>
#include <cmath>

#include "kernels/formats/quantizers.h"

namespace treadle::formats {
namespace {

// Half to even: a float of this size has units of 1.
constexpr float kUnits = 0x1.8p23f;

// |magnitude| <= 448, rounded half to even, without a sign.
uint32_t E4M3Magnitude(float magnitude) {
  // Below 2^-6 codes are multiples of 2^-9, and so is the mantissa of 2^14.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(magnitude + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
  const uint32_t bits = std::bit_cast<uint32_t>(magnitude);
  const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  return magnitude < 0x1p-6f ? subnormal : normal;
}

}  // namespace

float EncodeRowInt8(const float* values, int64_t count, float absmax, std::byte* codes) {
  const float inverse = 1.0f / absmax * 127.0f;  // two roundings, as in bitsandbytes
  // Nothing to scale by: zeros, or subnormal numbers.
  const float factor = std::isfinite(inverse) ? inverse : 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float rounded = values[i] * factor + kUnits;
    codes[i] = static_cast<std::byte>(std::bit_cast<uint32_t>(rounded) & 255);
  }
  return absmax / 127.0f;
}

float EncodeRowE4M3(const float* values, int64_t count, float absmax, std::byte* codes) {
  const float scale = absmax / 448.0f;
  const float divisor = scale > 0 ? scale : 1.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = values[i] / divisor;
    const float magnitude = std::fabs(scaled) < 448.0f ? std::fabs(scaled) : 448.0f;
    const uint32_t sign = std::bit_cast<uint32_t>(scaled) >> 24 & 128;
    codes[i] = static_cast<std::byte>(sign | E4M3Magnitude(magnitude));
  }
  return scale;
}

}  // namespace treadle::formats
