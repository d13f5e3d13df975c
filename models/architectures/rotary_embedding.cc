#include "models/architectures/rotary_embedding.h"

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

// YaRN's share of each pair that is divided by the factor: 0 up to the pair that turns beta_fast
// times within the original context, 1 from that of beta_slow turns on. (transformers, in float as
// there; the bounds are compared with numbers of elements, not of pairs, in either.)
std::vector<float> YarnShares(const ModelConfig& config, const Yarn& yarn) {
  const auto dim = static_cast<double>(config.rope_dim);
  const auto pair_of = [&](double turns) {
    const double context = static_cast<double>(yarn.original_context);
    return dim * std::log(context / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(config.rope_base));
  };
  double low = pair_of(yarn.beta_fast), high = pair_of(yarn.beta_slow);
  if (yarn.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  std::vector<float> shares;
  for (int64_t i = 0; i < config.rope_dim / 2; ++i) {
    const float ramp =
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low);
    shares.push_back(std::clamp(ramp, 0.0f, 1.0f));
  }
  return shares;
}

}  // namespace

std::vector<float> RotaryFrequencies(const ModelConfig& config, std::span<const float> factors) {
  std::vector<float> frequencies(static_cast<size_t>(config.rope_dim / 2)), shares;
  if (config.yarn) shares = YarnShares(config, *config.yarn);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.rope_dim);
    const auto wave = static_cast<float>(std::pow(config.rope_base, exponent));
    float frequency = 1.0f / wave;
    if (config.yarn) {
      const float kept = 1 - shares[i];
      const float divided = 1.0f / (static_cast<float>(config.yarn->factor) * wave);
      frequency = divided * (1 - kept) + frequency * kept;
    }
    if (config.rotated_pairs > 0 && static_cast<int64_t>(i) >= config.rotated_pairs) frequency = 0;
    if (config.rope_scaling) frequency = ScaleLlama3(frequency, *config.rope_scaling);
    frequency /= static_cast<float>(config.rope_linear_factor);
    if (!factors.empty()) frequency /= factors[i];
    frequencies[i] = frequency;
  }
  return frequencies;
}

absl::StatusOr<RotaryEmbedding> RotaryEmbedding::Create(
    std::span<const float> frequencies, int64_t max_positions, Backend& backend,
    absl::FunctionRef<float(int64_t position)> scale) {
  RotaryEmbedding out;
  const size_t half = frequencies.size();
  const size_t bytes = static_cast<size_t>(max_positions) * half * sizeof(float);
  TREADLE_ASSIGN_OR_RETURN(out.cos_, backend.Allocate(bytes));
  TREADLE_ASSIGN_OR_RETURN(out.sin_, backend.Allocate(bytes));
  std::vector<float> cosines(half), sines(half);
  for (int64_t position = 0; position < max_positions; ++position) {
    const float own = scale(position);
    for (size_t i = 0; i < half; ++i) {
      // The angle is rounded to float first, as in transformers.
      const float angle = static_cast<float>(position) * frequencies[i];
      cosines[i] = own * static_cast<float>(std::cos(static_cast<double>(angle)));
      sines[i] = own * static_cast<float>(std::sin(static_cast<double>(angle)));
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
