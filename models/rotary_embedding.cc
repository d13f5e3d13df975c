#include "models/rotary_embedding.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/status.h"

namespace treadle {
namespace {

// Long waves are stretched by the factor, short ones kept, those between blended (transformers'
// "llama3"), in float as there.
float ScaleLlama3(float frequency, const RopeScaling& scaling) {
  const auto context = static_cast<float>(scaling.original_context);
  const auto factor = static_cast<float>(scaling.factor);
  const auto low = static_cast<float>(scaling.low_freq_factor);
  const auto high = static_cast<float>(scaling.high_freq_factor);
  const float wavelength = 2 * std::numbers::pi_v<float> / frequency;
  if (wavelength > context / low) return frequency / factor;
  if (wavelength < context / high) return frequency;
  const float smooth = (context / wavelength - low) / (high - low);
  return (1 - smooth) * frequency / factor + smooth * frequency;
}

}  // namespace

std::vector<float> RotaryFrequencies(const ModelConfig& config, std::span<const float> factors) {
  std::vector<float> frequencies(static_cast<size_t>(config.rope_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.rope_dim);
    float frequency = 1.0f / static_cast<float>(std::pow(config.rope_base, exponent));
    if (config.rope_scaling) frequency = ScaleLlama3(frequency, *config.rope_scaling);
    frequency /= static_cast<float>(config.rope_linear_factor);
    if (!factors.empty()) frequency /= factors[i];
    frequencies[i] = frequency;
  }
  return frequencies;
}

absl::StatusOr<RotaryEmbedding> RotaryEmbedding::Create(std::span<const float> frequencies,
                                                        int64_t max_positions, Backend& backend,
                                                        float scale) {
  RotaryEmbedding out;
  const size_t half = frequencies.size();
  const size_t bytes = static_cast<size_t>(max_positions) * half * sizeof(float);
  TREADLE_ASSIGN_OR_RETURN(out.cos_, backend.Allocate(bytes));
  TREADLE_ASSIGN_OR_RETURN(out.sin_, backend.Allocate(bytes));
  std::vector<float> cosines(half), sines(half);
  for (int64_t position = 0; position < max_positions; ++position) {
    for (size_t i = 0; i < half; ++i) {
      // The angle is rounded to float first, as in transformers.
      const float angle = static_cast<float>(position) * frequencies[i];
      cosines[i] = scale * static_cast<float>(std::cos(static_cast<double>(angle)));
      sines[i] = scale * static_cast<float>(std::sin(static_cast<double>(angle)));
    }
    const size_t row = static_cast<size_t>(position) * half * sizeof(float);
    backend.CopyToDevice(out.cos_.data() + row, cosines.data(), half * sizeof(float));
    backend.CopyToDevice(out.sin_.data() + row, sines.data(), half * sizeof(float));
  }
  out.table_ = {reinterpret_cast<const float*>(out.cos_.data()),
                reinterpret_cast<const float*>(out.sin_.data()), static_cast<int64_t>(half),
                max_positions};
  return out;
}

}  // namespace treadle
