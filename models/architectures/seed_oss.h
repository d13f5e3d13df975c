// Seed-OSS (ByteDance 2025): Llama's layer with biases on Q, K and V and heads whose size
// config.json gives.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

namespace treadle {

inline constexpr auto kSeedOssTensors = Changed(std::to_array(kLlamaTensors), [](TensorRow& row) {
  if (row.part == Part::kFfnNorm) row.gguf = "post_attention_norm";
});
inline constexpr std::string_view kSeedOssClasses[] = {"SeedOssForCausalLM"};
inline constexpr FixedField kSeedOssFixed[] = {{"attention_bias", "true"},
                                               {"attention_out_bias", "false"},
                                               {"mlp_bias", "false"},
                                               {"hidden_act", "\"silu\""}};

inline constexpr Architecture kSeedOss = {
    .name = "seed_oss",
    .layer = LlamaLayer,
    .tensors = kSeedOssTensors,
    .qkv_bias = Presence::kAlways,
    .config_json = {.classes = kSeedOssClasses, .fixed = kSeedOssFixed}};

}  // namespace treadle
