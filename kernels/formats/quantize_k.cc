// The K types and the I types of four bits, as llama.cpp's quantizers make them (ggml-quants.c),
// with importance or without; and GGUF's blocks of 32 with importance.
#include <algorithm>
#include <cstring>

#include "kernels/formats/block_fits.h"
#include "kernels/formats/blocks.h"
#include "kernels/formats/k_scales.h"
#include "kernels/formats/quantizers.h"

namespace treadle::formats {
namespace {

constexpr int kSuper = 256;  // weights of a block of the K types

void StoreHalf(float value, std::byte* out) { StoreElement(DType::kF16, value, out, 0); }
uint8_t* Bytes(std::byte* data) { return reinterpret_cast<uint8_t*>(data); }

float Squares(const float* values, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += values[i] * values[i];
  return sum;
}

// The weights of errors where importance is known: it, times how large values like this one are.
void WeighByImportance(const float* values, const float* importance, float variance, int count,
                       float* weights) {
  for (int i = 0; i < count; ++i) {
    weights[i] = importance[i] * std::sqrt(variance + values[i] * values[i]);
  }
}
float Sum(const float* values, int count) {
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += values[i];
  return sum;
}

// Codes again, for the scale as it is stored: from -below to above, stored plus `below`. A scale of
// 0 leaves them as they are.
void Requantize(const float* values, int count, float scale, float minimum, int below, int above,
                uint8_t* codes) {
  if (scale == 0) return;
  for (int i = 0; i < count; ++i) {
    const int code = Clamp(Nearest((values[i] + minimum) / scale), -below, above);
    codes[i] = static_cast<uint8_t>(code + below);
  }
}

// Bits [from, from + 2) of codes, for each half of 128 those of four runs of 32 in a byte.
void PutPairs(const uint8_t* codes, int from, uint8_t* out) {
  for (int i = 0; i < kSuper / 4; ++i) {
    int byte = 0;
    for (int run = 0; run < 4; ++run) {
      byte |= (codes[i / 32 * 128 + run * 32 + i % 32] >> from & 3) << 2 * run;
    }
    out[i] = static_cast<uint8_t>(byte);
  }
}

// -- Q4_K and Q5_K --------------------------------------------------------------------------------

// The integers of scales that are not negative, of 6 bits, and what they are multiplied by.
float SixBits(const float* values, const float* weights, bool searched, uint8_t* integers) {
  constexpr int kGroups = 8;
  if (searched) return FitUnsigned({values, weights, kGroups}, 63, integers);
  const float largest = std::max(0.0f, *std::max_element(values, values + kGroups));
  const float inverse = largest > 0 ? 63.0f / largest : 0.0f;
  for (int g = 0; g < kGroups; ++g) {
    integers[g] = std::min<uint8_t>(63, static_cast<uint8_t>(Nearest(inverse * values[g])));
  }
  return largest / 63.0f;
}

template <int kBits>
void EncodeMinima(const float* values, const float* importance, std::byte* out) {
  constexpr int kMax = (1 << kBits) - 1, kGroup = 32, kGroups = 8;
  constexpr MinimumFit kPlain =
      kBits == 4 ? MinimumFit{-1.0f, 0.1f, 20} : MinimumFit{-0.5f, 0.1f, 15};
  constexpr MinimumFit kImportant = {-0.9f, 0.05f, 36};
  uint8_t codes[kSuper], scale_codes[kGroups], minimum_codes[kGroups];
  float scales[kGroups], minima[kGroups], sums[kGroups], weights[kGroup];
  const float variance = 2 * Squares(values, kSuper) / kSuper;
  for (int g = 0; g < kGroups; ++g) {
    const float* run = values + kGroup * g;
    if (importance != nullptr) {
      WeighByImportance(run, importance + kGroup * g, variance, kGroup, weights);
    } else {
      const float average = std::sqrt(Squares(run, kGroup) / kGroup);
      for (int i = 0; i < kGroup; ++i) weights[i] = average + std::fabs(run[i]);
    }
    sums[g] = Sum(weights, kGroup);
    scales[g] =
        FitMinimum({run, weights, kGroup}, kMax, importance != nullptr ? kImportant : kPlain,
                   codes + kGroup * g, &minima[g]);
  }
  StoreHalf(SixBits(scales, sums, importance != nullptr, scale_codes), out);
  StoreHalf(SixBits(minima, sums, importance != nullptr, minimum_codes), out + 2);
  uint8_t* packed = Bytes(out + 4);
  for (int g = 0; g < 4; ++g) {
    const int later = g + 4;
    packed[g] = static_cast<uint8_t>(scale_codes[g] | scale_codes[later] >> 4 << 6);
    packed[later] = static_cast<uint8_t>(minimum_codes[g] | minimum_codes[later] >> 4 << 6);
    packed[g + 8] =
        static_cast<uint8_t>((scale_codes[later] & 15) | (minimum_codes[later] & 15) << 4);
  }
  for (int g = 0; g < kGroups; ++g) {
    const ScaleAndMinimum pair = SixBitPair(packed, g);
    Requantize(values + kGroup * g, kGroup, LoadHalf(out) * static_cast<float>(pair.scale),
               LoadHalf(out + 2) * static_cast<float>(pair.minimum), 0, kMax, codes + kGroup * g);
  }
  uint8_t* high = packed + 12;
  uint8_t* nibbles = high + (kBits == 5 ? 32 : 0);
  if (kBits == 5) std::memset(high, 0, 32);
  for (int i = 0; i < kSuper / 2; ++i) {
    const uint8_t* pair = codes + i / 32 * 64 + i % 32;
    nibbles[i] = static_cast<uint8_t>((pair[0] & 15) | (pair[32] & 15) << 4);
    if (kBits == 4) continue;
    high[i % 32] = static_cast<uint8_t>(high[i % 32] | pair[0] >> 4 << i / 32 * 2 |
                                        pair[32] >> 4 << (i / 32 * 2 + 1));
  }
}

// -- Q3_K -----------------------------------------------------------------------------------------

void EncodeQ3_K(const float* values, const float* importance, std::byte* out) {
  constexpr int kGroup = 16, kGroups = 16;
  uint8_t codes[kSuper], scale_codes[kGroups];
  float scales[kGroups], sums[kGroups], weights[kGroup];
  const float variance = 2 * Squares(values, kSuper) / kSuper;
  for (int g = 0; g < kGroups; ++g) {
    const float* run = values + kGroup * g;
    if (importance != nullptr) {
      WeighByImportance(run, importance + kGroup * g, variance, kGroup, weights);
      sums[g] = Sum(weights, kGroup);
      scales[g] = FitSigned({run, weights, kGroup}, 4, codes + kGroup * g);
    } else {
      for (int i = 0; i < kGroup; ++i) weights[i] = run[i] * run[i];
      scales[g] = FitThreeBits({run, weights, kGroup}, codes + kGroup * g);
    }
  }
  float d = 0;
  if (importance != nullptr) {
    d = FitSigned({scales, sums, kGroups}, 32, scale_codes);
  } else if (const float extreme = Extreme({scales, nullptr, kGroups}); extreme != 0) {
    const float inverse = -32.0f / extreme;
    for (int g = 0; g < kGroups; ++g) {
      scale_codes[g] = static_cast<uint8_t>(Clamp(Nearest(inverse * scales[g]), -32, 31) + 32);
    }
    d = 1 / inverse;
  } else {
    std::memset(scale_codes, 0, kGroups);
  }
  uint8_t* packed = Bytes(out + 96);
  std::memset(packed, 0, 12);
  for (int g = 0; g < kGroups; ++g) {
    packed[g % 8] = static_cast<uint8_t>(packed[g % 8] | (scale_codes[g] & 15) << g / 8 * 4);
    uint8_t& high = packed[8 + g % 4];
    high = static_cast<uint8_t>(high | scale_codes[g] >> 4 << g / 4 * 2);
  }
  StoreHalf(d, out + 108);
  for (int g = 0; g < kGroups; ++g) {
    const float scale = LoadHalf(out + 108) * static_cast<float>(SixBitScale(packed, g));
    Requantize(values + kGroup * g, kGroup, scale, 0, 4, 3, codes + kGroup * g);
  }
  uint8_t* high = Bytes(out);
  std::memset(high, 0, 32);
  for (int i = 0; i < kSuper; ++i) {
    high[i % 32] = static_cast<uint8_t>(high[i % 32] | codes[i] >> 2 << i / 32);
  }
  PutPairs(codes, 0, Bytes(out + 32));
}

// -- Q6_K -----------------------------------------------------------------------------------------

void EncodeQ6_K(const float* values, const float* importance, std::byte* out) {
  constexpr int kGroup = 16, kGroups = 16;
  uint8_t codes[kSuper];
  float scales[kGroups], weights[kGroup];
  for (int g = 0; g < kGroups; ++g) {
    const float* run = values + kGroup * g;
    for (int i = 0; i < kGroup; ++i) {
      weights[i] = importance != nullptr ? importance[kGroup * g + i] : run[i] * run[i];
    }
    scales[g] = FitSigned({run, weights, kGroup}, 32, codes + kGroup * g);
  }
  const float extreme = Extreme({scales, nullptr, kGroups});
  if (std::fabs(extreme) < kNoMagnitude) {
    std::memset(out, 0, 210);
    return;
  }
  const float inverse = -128.0f / extreme;
  StoreHalf(1 / inverse, out + 208);
  for (int g = 0; g < kGroups; ++g) {
    const auto integer = static_cast<int8_t>(std::min(127, Nearest(inverse * scales[g])));
    out[192 + g] = static_cast<std::byte>(integer);
    Requantize(values + kGroup * g, kGroup, LoadHalf(out + 208) * static_cast<float>(integer), 0,
               32, 31, codes + kGroup * g);
  }
  for (int i = 0; i < kSuper / 2; ++i) {
    const uint8_t* pair = codes + i / 64 * 128 + i % 64;
    out[i] = static_cast<std::byte>((pair[0] & 15) | (pair[64] & 15) << 4);
  }
  PutPairs(codes, 4, Bytes(out + 128));
}

// -- IQ4_NL and IQ4_XS ----------------------------------------------------------------------------

// The nearest of the codebook; of two at the same distance the larger one.
int NearestOfIq4(float value) {
  const float* const values = kIQ4_NLCodebook.values;
  if (!(value > values[0])) return 0;
  const auto above = static_cast<int>(std::upper_bound(values, values + 16, value) - values);
  if (above == 16) return 15;
  return value - values[above - 1] < values[above] - value ? above - 1 : above;
}

// The scale of 32 values.
float FitIq4(const Run& run) {
  const float extreme = Extreme(run);
  if (std::fabs(extreme) < kNoMagnitude) return 0;
  constexpr int kTries = 7;
  const float lowest = kIQ4_NLCodebook.values[0];
  float scale = 0, best = 0;
  for (int attempt = -kTries - 1; attempt <= kTries; ++attempt) {
    const bool first = attempt < -kTries;
    const float inverse =
        first ? 1 / (-extreme / lowest) : (static_cast<float>(attempt) + lowest) / extreme;
    FitSums sums;
    for (int i = 0; i < run.count; ++i) {
      const float code = kIQ4_NLCodebook.values[NearestOfIq4(inverse * run.values[i])];
      sums.values += run.weights[i] * code * run.values[i];
      sums.squares += run.weights[i] * code * code;
    }
    if (!first && !(sums.squares > 0 && sums.values * sums.values > best * sums.squares)) continue;
    scale = sums.squares > 0 ? sums.values / sums.squares : 0.0f;
    best = scale * sums.values;
  }
  return scale;
}

// The weights of 32 values' errors.
void WeighIq4(const float* values, const float* importance, float variance, float* weights) {
  if (importance != nullptr) return WeighByImportance(values, importance, variance, 32, weights);
  for (int i = 0; i < 32; ++i) weights[i] = values[i] * values[i];
}

void PutIq4(const float* values, float inverse, uint8_t* out) {
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<uint8_t>(NearestOfIq4(inverse * values[i]) |
                                  NearestOfIq4(inverse * values[i + 16]) << 4);
  }
}
float Inverse(float scale) {
  const float inverse = 1 / scale;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

void EncodeIQ4_NL(const float* values, const float* importance, std::byte* out) {
  float weights[32];
  WeighIq4(values, importance, Squares(values, 32) * (2.0f / 32), weights);
  const float scale = FitIq4({values, weights, 32});
  StoreHalf(scale, out);
  PutIq4(values, Inverse(scale), Bytes(out + 2));
}

void EncodeIQ4_XS(const float* values, const float* importance, std::byte* out) {
  constexpr int kGroups = 8;
  float scales[kGroups], weights[32];
  const float variance = Squares(values, kSuper) * (2.0f / kSuper);
  for (int g = 0; g < kGroups; ++g) {
    const float* of_group = importance != nullptr ? importance + 32 * g : nullptr;
    WeighIq4(values + 32 * g, of_group, variance, weights);
    scales[g] = FitIq4({values + 32 * g, weights, 32});
  }
  const float d = -Extreme({scales, nullptr, kGroups}) / 32;
  StoreHalf(d, out);
  std::memset(out + 2, 0, 6);
  for (int g = 0; g < kGroups; ++g) {
    const int integer = Clamp(Nearest(Inverse(d) * scales[g]), -32, 31);
    PutIq4(values + 32 * g, Inverse(d * static_cast<float>(integer)), Bytes(out + 8 + 16 * g));
    uint8_t& high = Bytes(out)[2 + g / 4];
    uint8_t& low = Bytes(out)[4 + g / 2];
    high = static_cast<uint8_t>(high | (integer + 32) >> 4 << g % 4 * 2);
    low = static_cast<uint8_t>(low | ((integer + 32) & 15) << g % 2 * 4);
  }
}

// -- Blocks of 32 with importance -----------------------------------------------------------------

// Nibbles behind the constants, and before them the fifth bits if there are any.
void PutBlock(const uint8_t* codes, int bits, std::byte* out) {
  uint32_t fifth = 0;
  for (int i = 0; i < 32; ++i) fifth |= static_cast<uint32_t>(codes[i] >> 4) << i;
  if (bits == 5) {
    std::memcpy(out, &fifth, sizeof(fifth));
    out += sizeof(fifth);
  }
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<std::byte>((codes[i] & 15) | (codes[i + 16] & 15) << 4);
  }
}

template <int kBits, bool kMinimum>
void EncodeImportantBlocks(const float* values, const float* importance, int64_t blocks,
                           std::byte* out) {
  constexpr int64_t kBytes = (kMinimum ? 4 : 2) + 4 * kBits;
  const float variance = Squares(values, 32 * blocks) / static_cast<float>(32 * blocks);
  for (int64_t b = 0; b < blocks; ++b, values += 32, importance += 32, out += kBytes) {
    float weights[32], minimum = 0;
    uint8_t codes[32];
    WeighByImportance(values, importance, variance, 32, weights);
    const Run run = {values, weights, 32};
    if (kMinimum) {
      StoreHalf(FitMinimum(run, (1 << kBits) - 1, {-0.9f, 0.05f, 36}, codes, &minimum), out);
      StoreHalf(-minimum, out + 2);
    } else {
      StoreHalf(FitSigned(run, 1 << (kBits - 1), codes), out);
    }
    PutBlock(codes, kBits, out + (kMinimum ? 4 : 2));
  }
}

// -- Q5_0 and Q5_1 without ------------------------------------------------------------------------

void EncodeQ5_0(const float* values, const float*, std::byte* out) {
  const float d = Extreme({values, nullptr, 32}) / -16;
  StoreHalf(d, out);
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) {
    codes[i] = static_cast<uint8_t>(std::min(31, static_cast<int>(values[i] * Inverse(d) + 16.5f)));
  }
  PutBlock(codes, 5, out + 2);
}

void EncodeQ5_1(const float* values, const float*, std::byte* out) {
  const auto [least, most] = std::minmax_element(values, values + 32);
  const float d = (*most - *least) / 31;
  StoreHalf(d, out);
  StoreHalf(*least, out + 2);
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) {
    codes[i] = static_cast<uint8_t>((values[i] - *least) * Inverse(d) + 0.5f);
  }
  PutBlock(codes, 5, out + 4);
}

template <void (*kEncode)(const float*, const float*, std::byte*), int64_t kValues, int64_t kBytes>
void EncodeEach(const float* values, const float* importance, int64_t blocks, std::byte* out) {
  for (int64_t b = 0; b < blocks; ++b, values += kValues, out += kBytes) {
    kEncode(values, importance != nullptr ? importance + b * kValues : nullptr, out);
  }
}
template <void (*kEncode)(const float*, const float*, std::byte*), int kBits, bool kMinimum>
void EncodePlainOrImportant(const float* values, const float* importance, int64_t blocks,
                            std::byte* out) {
  constexpr int64_t kBytes = (kMinimum ? 4 : 2) + 4 * kBits;
  (importance != nullptr ? EncodeImportantBlocks<kBits, kMinimum>
                         : EncodeEach<kEncode, 32, kBytes>)(values, importance, blocks, out);
}

constexpr float kLargestHalf = 65504.0f;

constexpr BlockEncoder kEncoders[] = {
    {"q5_0", EncodePlainOrImportant<EncodeQ5_0, 5, false>, 16 * kLargestHalf},
    {"q5_1", EncodePlainOrImportant<EncodeQ5_1, 5, true>, kLargestHalf},
    {"q3_k", EncodeEach<EncodeQ3_K, 256, 110>, kLargestHalf},
    {"q4_k", EncodeEach<EncodeMinima<4>, 256, 144>, kLargestHalf},
    {"q5_k", EncodeEach<EncodeMinima<5>, 256, 176>, kLargestHalf},
    {"q6_k", EncodeEach<EncodeQ6_K, 256, 210>, kLargestHalf},
    {"iq4_nl", EncodeEach<EncodeIQ4_NL, 32, 18>, kLargestHalf},
    {"iq4_xs", EncodeEach<EncodeIQ4_XS, 256, 136>, kLargestHalf},
};

}  // namespace

std::span<const BlockEncoder> SearchingEncoders() { return kEncoders; }

void EncodeImportantQ4_0(const float* values, const float* importance, int64_t blocks,
                         std::byte* out) {
  EncodeImportantBlocks<4, false>(values, importance, blocks, out);
}
void EncodeImportantQ4_1(const float* values, const float* importance, int64_t blocks,
                         std::byte* out) {
  EncodeImportantBlocks<4, true>(values, importance, blocks, out);
}

}  // namespace treadle::formats
