// Families that differ from Llama by little: ERNIE 4.5 without experts (Baidu 2025), whose heads
// rotate in adjacent pairs, which files of both kinds keep side by side; Seed-OSS (ByteDance 2025),
// with biases on Q, K and V and heads whose size config.json gives.
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
