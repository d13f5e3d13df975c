// Hunyuan's dense models (Tencent 2025): Llama's layer with a norm on each head's queries and keys
// after they have rotated.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

namespace treadle {

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
