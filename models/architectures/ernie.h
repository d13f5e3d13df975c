// ERNIE 4.5 without experts (Baidu 2025): Llama's layer, whose heads rotate in adjacent pairs,
// which files of both kinds keep side by side.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

namespace treadle {

inline constexpr std::string_view kErnie45Classes[] = {"Ernie4_5ForCausalLM",
                                                       "Ernie4_5_ForCausalLM"};
inline constexpr FixedField kErnie45Fixed[] = {{"use_bias", "false"}, {"hidden_act", "\"silu\""}};

inline constexpr Architecture kErnie45 = {.name = "ernie4_5",
                                          .layer = LlamaLayer,
                                          .tensors = kLlamaTensors,
                                          .config_json = {.classes = kErnie45Classes,
                                                          .fixed = kErnie45Fixed,
                                                          .default_epsilon = 1e-5,
                                                          .default_rope_base = 500000,
                                                          .tied_head = true},
                                          .gguf_pairs = true,
                                          .hugging_face_pairs = true};

}  // namespace treadle
