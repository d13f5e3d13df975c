// EXAONE 4 (LG AI Research 2025): OLMo's norms of what halves of a layer add, but norms of each
// head; where there are local layers, they alone rotate.
//
// Thread safety: constants and a pure function.
#pragma once

#include "models/architectures/olmo.h"

namespace treadle {

inline constexpr std::string_view kExaone4Classes[] = {"Exaone4ForCausalLM"};

inline constexpr Architecture kExaone4 = {
    .name = "exaone4",
    .layer = LlamaLayer,
    .tensors = kNormsAfterTensors,
    .qk_norm = true,
    .local_layers = Presence::kAsStored,
    .global_every = 4,
    .unrotated_every = [](const ModelConfig& c) { return c.window > 0 ? c.global_every : 0; },
    .config_json = {.classes = kExaone4Classes, .fixed = kOlmo2Fixed, .default_epsilon = 1e-5}};

}  // namespace treadle
