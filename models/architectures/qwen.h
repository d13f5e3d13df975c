// Qwen 2, 2.5 and 3 (the dense models): Llama's layer, with biases on Q, K and V (Yang et al. 2024,
// section 2.2.1) or, in Qwen 3, a norm on each head's queries and keys before they rotate, and
// heads whose size config.json gives (Yang et al. 2025, section 2).
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

namespace treadle {

inline constexpr std::string_view kQwen2Classes[] = {"Qwen2ForCausalLM"};
inline constexpr FixedField kQwenFixed[] = {{"hidden_act", "\"silu\""}};

inline constexpr Architecture kQwen2 = {
    .name = "qwen2",
    .layer = LlamaLayer,
    .tensors = kLlamaTensors,
    .qkv_bias = Presence::kAlways,
    .config_json = {
        .classes = kQwen2Classes, .fixed = kQwenFixed, .window_switch = "use_sliding_window"}};

inline constexpr std::string_view kQwen3Classes[] = {"Qwen3ForCausalLM"};
inline constexpr FixedField kQwen3Fixed[] = {{"hidden_act", "\"silu\""},
                                             {"attention_bias", "false"}};

inline constexpr Architecture kQwen3 = {
    .name = "qwen3",
    .layer = LlamaLayer,
    .tensors = kLlamaTensors,
    .qk_norm = true,
    .config_json = {
        .classes = kQwen3Classes, .fixed = kQwen3Fixed, .window_switch = "use_sliding_window"}};

}  // namespace treadle
