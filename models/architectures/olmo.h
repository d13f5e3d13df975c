// OLMo 2 (OLMo Team 2024, section 3.2) and OLMo 3 (2025): Llama's layer with norms of what its
// halves add instead of what they read, and one norm of all queries and one of all keys. OLMo 3 has
// local layers, which YaRN does not scale.
//
// Ranks hold all of Q and K, because a norm of all heads wants them, and divide what comes after.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

namespace treadle {

// Also EXAONE 4's.
inline constexpr auto kNormsAfterTensors =
    Changed(std::to_array(kLlamaTensors), [](TensorRow& row) {
      if (row.part == Part::kAttentionNorm) {
        row = {Part::kPostAttentionNorm, "post_attention_norm", "post_attention_layernorm",
               Extent::kHidden};
      }
      if (row.part == Part::kFfnNorm) {
        row = {Part::kPostFfnNorm, "post_ffw_norm", "post_feedforward_layernorm", Extent::kHidden};
      }
    });
inline constexpr auto kOlmo2Tensors = Changed(kNormsAfterTensors, [](TensorRow& row) {
  if (row.part == Part::kQ || row.part == Part::kQNorm) row.rows = Extent::kAllQueries;
  if (row.part == Part::kK || row.part == Part::kKNorm) row.rows = Extent::kAllKeys;
});
inline constexpr std::string_view kOlmo2Classes[] = {"Olmo2ForCausalLM", "Olmo3ForCausalLM"};
inline constexpr FixedField kOlmo2Fixed[] = {{"hidden_act", "\"silu\""}};

inline constexpr Architecture kOlmo2 = {.name = "olmo2",
                                        .layer = LlamaLayer,
                                        .tensors = kOlmo2Tensors,
                                        .qkv_bias = Presence::kAsStored,
                                        .output_bias = Presence::kAsStored,
                                        .qk_norm = true,
                                        .local_layers = Presence::kAsStored,
                                        .global_every = 4,
                                        .local_unscaled = true,
                                        .config_json = {.classes = kOlmo2Classes,
                                                        .fixed = kOlmo2Fixed,
                                                        .default_epsilon = 1e-5,
                                                        .window_model_type = "olmo3"}};

}  // namespace treadle
