// Dense types, GGUF's plainer blocks as ggml's reference quantizers make them, and
// 8-bit codes with one scale per row: LLM.int8() as bitsandbytes quantizes weights (Dettmers,
// chapter 2), and FP8 E4M3. Loops have no branches, so that compilers can vectorize them.
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernels/formats/families.h"
#include "kernels/formats/quantizers.h"

namespace treadle::formats {
namespace {

constexpr int64_t kBlock = 32;
constexpr float kLargestHalf = 65504.0f;

void StoreHalf(float value, std::byte* out) { StoreElement(DType::kF16, value, out, 0); }

template <DType kType>
void EncodeDense(const float* values, const float*, int64_t count, std::byte* out) {
  for (int64_t i = 0; i < count; ++i) StoreElement(kType, values[i], out, i);
}

// The scale of codes. A block of zeros has d = 0; so has, in 16 bits, one whose reciprocal
// overflows, and its codes do not matter.
float Inverse(float d) {
  const float inverse = 1.0f / d;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

// d = absmax / 127, codes rounded half away from zero.
void EncodeQ8_0(const float* values, const float*, int64_t blocks, std::byte* out) {
  for (int64_t b = 0; b < blocks; ++b, values += kBlock, out += 34) {
    float absmax = 0;
    for (int i = 0; i < kBlock; ++i) absmax = std::max(absmax, std::fabs(values[i]));
    const float d = absmax / 127;
    const float inverse = Inverse(d);
    StoreHalf(d, out);
    int8_t codes[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      const float scaled = values[i] * inverse;
      const float magnitude = std::fabs(scaled);
      const int whole = static_cast<int>(magnitude);
      const int rounded = whole + (magnitude - static_cast<float>(whole) >= 0.5f ? 1 : 0);
      codes[i] = static_cast<int8_t>(scaled < 0 ? -rounded : rounded);
    }
    std::memcpy(out + 2, codes, sizeof(codes));
  }
}

// Codes of the first half of a block lie in low nibbles.
void StoreNibbles(const int* codes, std::byte* out) {
  for (int i = 0; i < kBlock / 2; ++i) {
    out[i] = static_cast<std::byte>(codes[i] | codes[i + kBlock / 2] << 4);
  }
}

// The value of the largest magnitude (of several the first) becomes code 0, that is -8 d.
void EncodeQ4_0(const float* values, const float* importance, int64_t blocks, std::byte* out) {
  if (importance != nullptr) return EncodeImportantQ4_0(values, importance, blocks, out);
  for (int64_t b = 0; b < blocks; ++b, values += kBlock, out += 18) {
    float absmax = 0;
    for (int i = 0; i < kBlock; ++i) absmax = std::max(absmax, std::fabs(values[i]));
    float extreme = 0;
    for (int64_t i = kBlock - 1; i >= 0; --i) {
      extreme = std::fabs(values[i]) == absmax ? values[i] : extreme;
    }
    const float d = extreme / -8;
    const float inverse = Inverse(d);
    StoreHalf(d, out);
    int codes[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      codes[i] = std::min(15, static_cast<int>(values[i] * inverse + 8.5f));
    }
    StoreNibbles(codes, out + 2);
  }
}

void EncodeQ4_1(const float* values, const float* importance, int64_t blocks, std::byte* out) {
  if (importance != nullptr) return EncodeImportantQ4_1(values, importance, blocks, out);
  for (int64_t b = 0; b < blocks; ++b, values += kBlock, out += 20) {
    float least = values[0];
    float most = values[0];
    for (int i = 1; i < kBlock; ++i) {
      least = std::min(least, values[i]);
      most = std::max(most, values[i]);
    }
    const float d = (most - least) / 15;
    const float inverse = Inverse(d);
    StoreHalf(d, out);
    StoreHalf(least, out + 2);
    int codes[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      codes[i] = std::min(15, static_cast<int>((values[i] - least) * inverse + 0.5f));
    }
    StoreNibbles(codes, out + 4);
  }
}

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

constexpr BlockEncoder kEncoders[] = {
    {"f32", EncodeDense<DType::kF32>, FLT_MAX},
    {"f16", EncodeDense<DType::kF16>, kLargestHalf},
    {"bf16", EncodeDense<DType::kBF16>, 0x1.fep127f},
    {"q8_0", EncodeQ8_0, 127 * kLargestHalf},
    {"q4_0", EncodeQ4_0, 8 * kLargestHalf},
    {"q4_1", EncodeQ4_1, kLargestHalf},
};

}  // namespace

const BlockEncoder* FindBlockEncoder(std::string_view format) {
  for (const BlockEncoder& encoder : kEncoders) {
    if (encoder.format == format) return &encoder;
  }
  for (const BlockEncoder& encoder : SearchingEncoders()) {
    if (encoder.format == format) return &encoder;
  }
  return nullptr;
}

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
