// Double quantization of scales (QLoRA; Dettmers, chapter 5), as bitsandbytes' CPU code does it: a
// scale is rounded to one of 65,536 even steps first, and the step to the nearest value of the map.
#include <algorithm>
#include <cmath>

#include "base/status.h"
#include "kernels/formats/quantizers.h"

namespace treadle {
namespace {

constexpr int64_t kNestedBlock = 256;
constexpr int kSteps = 65536;

// The code of each step from -1 to 1.
std::vector<uint8_t> TabulateSteps() {
  const std::span<const float> map = DynamicMap();
  std::vector<uint8_t> codes(kSteps);
  size_t code = 0;
  for (int i = 0; i < kSteps; ++i) {
    const float value = -1.0f + 2.0f * static_cast<float>(i) / (kSteps - 1);
    while (code < 255 && (map[code] + map[code + 1]) * 0.5f < value) ++code;
    codes[i] = static_cast<uint8_t>(code);
  }
  return codes;
}

// value: -1 to 1. One rounding of the product and the sum together.
int StepOf(float value) {
  const float half = (std::clamp(value, -1.0f, 1.0f) + 1.0f) * 0.5f;
  return static_cast<int>(std::fma(half, static_cast<float>(kSteps - 1), 0.5f));
}

}  // namespace

std::span<const float> DynamicMap(bool has_sign) {
  static const std::vector<float> signed_map = formats::DynamicCodebook(8);
  static const std::vector<float> unsigned_map = formats::DynamicCodebook(8, /*has_sign=*/false);
  return has_sign ? signed_map : unsigned_map;
}

std::vector<float> DecodeScales(const NestedScales& nested) {
  const std::span<const float> map = DynamicMap();
  std::vector<float> scales(nested.codes.size());
  TREADLE_CHECK(nested.absmax.size() == (scales.size() + kNestedBlock - 1) / kNestedBlock);
  for (size_t i = 0; i < scales.size(); ++i) {
    scales[i] = map[nested.codes[i]] * nested.absmax[i / kNestedBlock] + nested.offset;
  }
  return scales;
}

namespace formats {

float MeanOf(std::span<const float> scales) {
  double sum = 0;
  for (const float scale : scales) sum += scale;
  return static_cast<float>(sum / static_cast<double>(scales.size()));
}

NestedScales NestScales(std::span<const float> scales, float offset) {
  static const std::vector<uint8_t> step_codes = TabulateSteps();
  NestedScales nested = {
      .codes = std::vector<uint8_t>(scales.size()), .absmax = {}, .offset = offset};
  for (size_t begin = 0; begin < scales.size(); begin += kNestedBlock) {
    const size_t end = std::min(scales.size(), begin + kNestedBlock);
    float absmax = 0;
    for (size_t i = begin; i < end; ++i) absmax = std::max(absmax, std::fabs(scales[i] - offset));
    nested.absmax.push_back(absmax);
    if (absmax == 0) continue;  // any code decodes to the offset
    const float inverse = 1.0f / absmax;
    for (size_t i = begin; i < end; ++i) {
      nested.codes[i] = step_codes[StepOf((scales[i] - offset) * inverse)];
    }
  }
  return nested;
}

}  // namespace formats
}  // namespace treadle
