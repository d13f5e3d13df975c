// Rotary position embeddings (RoFormer, section 3.2.2), with linear, Llama-3 and YaRN
// frequency scaling.
#pragma once

#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/backend.h"
#include "models/architectures/model_config.h"

namespace treadle {

// The factor of a pair that does not rotate, in GGUF's rope_freqs.
inline constexpr float kUnrotated = 1e30f;

// Frequency of each pair, [rope_dim / 2]. `factors`, if not empty, divide them (GGUF's rope_freqs).
std::vector<float> RotaryFrequencies(const ModelConfig& config, std::span<const float> factors);

// Whether queries are multiplied by a factor of their position (Yarn::query_beta, ModelConfig's),
// which is 1 within the context of training.
inline bool ScalesQueries(const ModelConfig& config, int64_t max_positions) {
  return (config.yarn && config.yarn->query_beta > 0 &&
          max_positions > config.yarn->original_context) ||
         (config.query_beta > 0 && max_positions >= config.query_floor);
}

// The tables on the device. Thread safety: constant.
class RotaryEmbedding {
 public:
  RotaryEmbedding() = default;
  // scale: of what is rotated to a position.
  static absl::StatusOr<RotaryEmbedding> Create(
      std::span<const float> frequencies, int64_t max_positions, Backend& backend,
      absl::FunctionRef<float(int64_t position)> scale = [](int64_t) { return 1.0f; });
  const RotaryTable& table() const { return table_; }
  uint64_t bytes() const { return cos_.bytes() + sin_.bytes(); }
  // The bytes of the tables for so many positions.
  static int64_t Bytes(const ModelConfig& config, int64_t max_positions) {
    int64_t dims = config.rope_dim * (1 + ScalesQueries(config, max_positions));
    if (config.local_rope_base > 0) {
      dims += config.local_head_dim > 0 ? config.local_head_dim : config.rope_dim;
    }
    return max_positions * dims * static_cast<int64_t>(sizeof(float));
  }

 private:
  Buffer cos_;  // [max_positions, half_dim] f32
  Buffer sin_;  // [max_positions, half_dim] f32
  RotaryTable table_;
};

}  // namespace treadle
