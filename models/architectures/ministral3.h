// Ministral 3, the models of text (Mistral AI 2025): Llama's layer with YaRN, and queries that grow
// with the logarithm of how often the context of training fits before them.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

namespace treadle {

inline constexpr std::string_view kMinistral3Classes[] = {"Ministral3ForCausalLM"};
inline constexpr FixedField kMinistral3Fixed[] = {{"hidden_act", "\"silu\""}};

inline constexpr Architecture kMinistral3 = {.name = "mistral3",
                                             .layer = LlamaLayer,
                                             .tensors = kLlamaTensors,
                                             .config_json = {.classes = kMinistral3Classes,
                                                             .fixed = kMinistral3Fixed,
                                                             .default_epsilon = 1e-5,
                                                             .default_rope_base = 1e6,
                                                             .model_type = "ministral3"},
                                             .gguf_pairs = true};

}  // namespace treadle
