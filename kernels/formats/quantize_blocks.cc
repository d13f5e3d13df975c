// Dense types, and GGUF's blocks as ggml's reference quantizers make them (no importance weights).
// Loops have no branches, so that compilers can vectorize them.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernels/formats/families.h"
#include "kernels/formats/quantizers.h"

namespace treadle::formats {
namespace {

constexpr int64_t kBlock = 32;
constexpr float kLargestHalf = 65504.0f;

void StoreHalf(float value, std::byte* out) {
  const Half half = ToHalf(value);
  std::memcpy(out, &half.bits, sizeof(half.bits));
}

void EncodeF32(const float* values, int64_t count, std::byte* out) {
  std::memcpy(out, values, static_cast<size_t>(count) * sizeof(float));
}

void EncodeF16(const float* values, int64_t count, std::byte* out) {
  for (int64_t i = 0; i < count; ++i) StoreHalf(values[i], out + 2 * i);
}

void EncodeBF16(const float* values, int64_t count, std::byte* out) {
  for (int64_t i = 0; i < count; ++i) {
    const BFloat16 value = ToBFloat16(values[i]);
    std::memcpy(out + 2 * i, &value.bits, sizeof(value.bits));
  }
}

// What codes are scaled by. A block of zeros has d = 0; so has, in 16 bits, one whose reciprocal
// overflows, and its codes do not matter.
float Inverse(float d) {
  const float inverse = 1.0f / d;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

// d = absmax / 127, codes rounded half away from zero.
void EncodeQ8_0(const float* values, int64_t blocks, std::byte* out) {
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
void EncodeQ4_0(const float* values, int64_t blocks, std::byte* out) {
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

void EncodeQ4_1(const float* values, int64_t blocks, std::byte* out) {
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

constexpr BlockEncoder kEncoders[] = {
    {"f32", EncodeF32, FLT_MAX},
    {"f16", EncodeF16, kLargestHalf},
    {"bf16", EncodeBF16, 0x1.fep127f},
    {"q8_0", EncodeQ8_0, 127 * kLargestHalf},
    {"q4_0", EncodeQ4_0, 8 * kLargestHalf},
    {"q4_1", EncodeQ4_1, kLargestHalf},
};

}  // namespace

const BlockEncoder* FindBlockEncoder(std::string_view format) {
  for (const BlockEncoder& encoder : kEncoders) {
    if (encoder.format == format) return &encoder;
  }
  return nullptr;
}

}  // namespace treadle::formats
