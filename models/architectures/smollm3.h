// SmolLM3 (Bakouch et al. 2025): Llama's layer, but that each fourth layer has no rotary embedding.
//
// Thread safety: constants and a pure function.
#pragma once

#include "models/architectures/llama.h"

namespace treadle {

inline constexpr JsonField kSmolLm3Own[] = {
    {"no_rope_layer_interval", &ModelConfig::unrotated_every}};
inline constexpr std::string_view kSmolLm3Classes[] = {"SmolLM3ForCausalLM"};
inline constexpr Architecture kSmolLm3 = {
    .name = "smollm3",
    .layer = LlamaLayer,
    .tensors = kLlamaTensors,
    .qkv_bias = Presence::kAsStored,
    .output_bias = Presence::kAsStored,
    .unrotated_every = [](const ModelConfig&) { return int64_t{4}; },
    .config_json = {.classes = kSmolLm3Classes,
                    .own = kSmolLm3Own,
                    .fixed = kLlamaFixed,
                    .default_rope_base = 2e6,
                    .tied_head = true,
                    .window_switch = "use_sliding_window"},
    .gguf_pairs = true};

}  // namespace treadle
