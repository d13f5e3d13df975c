// Families that differ from Llama by little: ERNIE 4.5 without experts (Baidu 2025), whose heads
// rotate in adjacent pairs, which files of both kinds keep side by side; Seed-OSS (ByteDance 2025),
// with biases on Q, K and V and heads whose size config.json gives; SmolLM3 (Bakouch et al. 2025),
// each fourth of whose layers has no rotary embedding; Hunyuan's dense models (Tencent 2025), with
// a norm on each head's queries and keys after they have rotated.
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

inline constexpr auto kHunyuanTensors = Changed(std::to_array(kLlamaTensors), [](TensorRow& row) {
  if (row.part == Part::kQNorm) row.hugging_face = "self_attn.query_layernorm";
  if (row.part == Part::kKNorm) row.hugging_face = "self_attn.key_layernorm";
});
inline constexpr std::string_view kHunyuanClasses[] = {"HunYuanDenseV1ForCausalLM"};
inline constexpr FixedField kHunyuanFixed[] = {
    {"mlp_bias", "false"}, {"attention_bias", "false"}, {"hidden_act", "\"silu\""}};

inline constexpr Architecture kHunyuan = {.name = "hunyuan-dense",
                                          .layer = LlamaLayer,
                                          .tensors = kHunyuanTensors,
                                          .qk_norm = true,
                                          .norms_after_rotation = true,
                                          .config_json = {.classes = kHunyuanClasses,
                                                          .fixed = kHunyuanFixed,
                                                          .default_epsilon = 1e-5,
                                                          .model_type = "hunyuan_v1_dense"}};

}  // namespace treadle
