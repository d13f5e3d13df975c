// The data types of k-bit inference (Dettmers, chapter 3; dynamic exponents: Dettmers, "8-Bit
// Approximations for Parallelism in Deep Learning", section 2). Values equal those that
// bitsandbytes builds with PyTorch on processors with fused multiply-add.
#include <algorithm>
#include <cmath>

#include "base/status.h"
#include "kernels/formats/quantizers.h"

namespace treadle::formats {
namespace {

// `count` >= 2 values from `start` to `end`, counted from the nearer end: each rounded once.
std::vector<float> Linspace(float start, float end, int count) {
  const float step = (end - start) / static_cast<float>(count - 1);
  std::vector<float> values;
  for (int i = 0; i < count; ++i) {
    values.push_back(i < count / 2 ? std::fma(step, static_cast<float>(i), start)
                                   : std::fma(-step, static_cast<float>(count - 1 - i), end));
  }
  return values;
}

// Sorts and divides by the largest magnitude.
std::vector<float> Normalized(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  const float largest = std::max(std::fabs(values.front()), std::fabs(values.back()));
  for (float& value : values) value /= largest > 0 ? largest : 1.0f;
  return values;
}

}  // namespace

// 2^bits - 1 values around 0; the code that is left over repeats the last.
std::vector<float> IntCodebook(int bits) {
  std::vector<float> values = Linspace(-1, 1, (1 << bits) - 1);
  values[values.size() / 2] = 0;  // but for rounding
  values.push_back(1);
  return values;
}

std::vector<float> FloatCodebook(int bits, int exponent_bits) {
  const int mantissa_bits = bits - 1 - exponent_bits;
  TREADLE_CHECK(exponent_bits >= 1 && mantissa_bits >= 0);
  const int bias = 1 << (exponent_bits - 1);
  std::vector<float> values;
  for (int exponent = 0; exponent < 1 << exponent_bits; ++exponent) {
    for (int mantissa = 0; mantissa < 1 << mantissa_bits; ++mantissa) {
      const double fraction = std::ldexp(mantissa, -mantissa_bits);
      const double value = exponent == 0 ? std::ldexp(fraction, -bias)
                                         : std::ldexp(1 + fraction, bias + 1 - exponent);
      values.push_back(static_cast<float>(value));
      values.push_back(value == 0 ? 0.0f : static_cast<float>(-value));
    }
  }
  return Normalized(std::move(values));
}

std::vector<float> E2M1Codebook() {
  std::vector<float> values;
  for (const float value : {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f}) {
    values.push_back(value);
    values.push_back(0.0f - value);
  }
  return Normalized(std::move(values));
}

std::vector<float> DynamicCodebook(int bits, bool has_sign) {
  std::vector<float> values = {0, 1};
  for (int i = 0; i < bits - 1; ++i) {
    const std::vector<float> edges = Linspace(0.1f, 1, (has_sign ? 1 << i : 2 << i) + 1);
    const auto power = static_cast<float>(std::pow(10.0, i - (bits - 2)));
    for (size_t j = 1; j < edges.size(); ++j) {
      const float value = (edges[j - 1] + edges[j]) / 2 * power;
      values.push_back(value);
      if (has_sign) values.push_back(-value);
    }
  }
  std::sort(values.begin(), values.end());
  return values;
}

// The medians of 2^bits - 1 bins of equal mass, and 0. Large matrices are sampled: a
// low-discrepancy sequence meets every row and column.
std::vector<float> QuantileCodebook(int bits, std::span<const float> values,
                                    std::span<const float> scales, int64_t scale_block) {
  constexpr uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;
  constexpr size_t kSamples = size_t{1} << 20;
  const bool all = values.size() <= kSamples;
  std::vector<float> sample(all ? values.size() : kSamples);
  for (size_t i = 0; i < sample.size(); ++i) {
    const uint64_t spread = (i * kGoldenRatio) >> 32;  // of 2^32
    const size_t at = all ? i : static_cast<size_t>((__uint128_t{spread} * values.size()) >> 32);
    const float scale = scales[at / static_cast<size_t>(scale_block)];
    sample[i] = scale > 0 ? values[at] / scale : 0.0f;
  }
  std::sort(sample.begin(), sample.end());
  const int bins = (1 << bits) - 1;
  std::vector<float> codebook = {0};
  for (int bin = 0; bin < bins; ++bin) {
    const double at = (bin + 0.5) / bins * static_cast<double>(sample.size()) - 0.5;
    const double clamped = std::clamp(at, 0.0, static_cast<double>(sample.size() - 1));
    const auto low = static_cast<size_t>(clamped);
    const size_t high = std::min(low + 1, sample.size() - 1);
    const double part = clamped - static_cast<double>(low);
    codebook.push_back(static_cast<float>((1 - part) * sample[low] + part * sample[high]));
  }
  return Normalized(std::move(codebook));
}

}  // namespace treadle::formats
