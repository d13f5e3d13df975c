// Scalar element types of tensors and caches, and their exact conversions.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace treadle {

// kI8: operands of integer products, and a K/V cache (KvLayout).
enum class DType : uint8_t { kF32, kF16, kBF16, kI8 };

constexpr size_t SizeOf(DType type) { return type == DType::kF32 ? 4 : type == DType::kI8 ? 1 : 2; }
constexpr std::string_view Name(DType type) {
  switch (type) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kI8:
      return "int8";
  }
  return "?";
}

// Bit patterns of the 16-bit types; arithmetic is always done in float.
struct Half {
  uint16_t bits = 0;
};
struct BFloat16 {
  uint16_t bits = 0;
};

constexpr float ToFloat(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

constexpr float ToFloat(Half x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1f;
  const uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Round half to even; finite values beyond 65504 saturate to +-65504 (the K/V cache's rule,
// docs/design.md, Numerics), infinities and NaN stay what they are.
constexpr Half ToHalf(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude == 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, rounded by the addition
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  const uint32_t half = (rounded - 0x38000000u) >> 13;
  return {static_cast<uint16_t>(sign | (half > 0x7bffu ? 0x7bffu : half))};
}

// Round half to even; NaN stays NaN.
constexpr BFloat16 ToBFloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Element `index` of an array of a type of floats, of any alignment.
inline float LoadElement(DType type, const void* data, int64_t index) {
  const auto* from =
      static_cast<const std::byte*>(data) + index * int64_t{type == DType::kF32 ? 4 : 2};
  float x;
  Half half;
  if (type == DType::kF32) {
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  std::memcpy(&half, from, sizeof(half));
  return type == DType::kF16 ? ToFloat(half) : ToFloat(BFloat16{half.bits});
}
inline void StoreElement(DType type, float x, void* data, int64_t index) {
  auto* to = static_cast<std::byte*>(data) + index * int64_t{type == DType::kF32 ? 4 : 2};
  if (type == DType::kF32) {
    std::memcpy(to, &x, sizeof(x));
  } else {
    const uint16_t bits = type == DType::kF16 ? ToHalf(x).bits : ToBFloat16(x).bits;
    std::memcpy(to, &bits, sizeof(bits));
  }
}

}  // namespace treadle
