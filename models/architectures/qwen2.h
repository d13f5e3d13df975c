// Qwen 2 and 2.5 (Yang et al. 2024, section 2.2.1): Llama's layer with biases on Q, K and V.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

namespace treadle {

inline constexpr std::string_view kQwen2Classes[] = {"Qwen2ForCausalLM"};
inline constexpr FixedField kQwenFixed[] = {{"hidden_act", "\"silu\""}};

inline constexpr Architecture kQwen2 = {.name = "qwen2",
                                        .layer = LlamaLayer,
                                        .tensors = kLlamaTensors,
                                        .qkv_bias = Presence::kAlways,
                                        .config_json = {.classes = kQwen2Classes,
                                                        .sizes = kLlamaSizes,
                                                        .fixed = kQwenFixed,
                                                        .window_switch = "use_sliding_window"}};

}  // namespace treadle
