// Qwen 3 (Yang et al. 2025, section 2), the dense models: Llama's layer with a norm on each head's
// queries and keys before they rotate, and heads whose size config.json gives.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

namespace treadle {

inline constexpr std::string_view kQwen3Classes[] = {"Qwen3ForCausalLM"};
inline constexpr FixedField kQwen3Fixed[] = {{"hidden_act", "\"silu\""},
                                             {"attention_bias", "false"}};

inline constexpr Architecture kQwen3 = {.name = "qwen3",
                                        .layer = LlamaLayer,
                                        .tensors = kLlamaTensors,
                                        .qk_norm = true,
                                        .config_json = {.classes = kQwen3Classes,
                                                        .sizes = kLlamaSizes,
                                                        .fixed = kQwen3Fixed,
                                                        .window_switch = "use_sliding_window"}};

}  // namespace treadle
