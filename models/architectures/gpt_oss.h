// gpt-oss (OpenAI 2025, model card, section 2): Llama's layer with biases everywhere, attention
// sinks, layers that see a window in turn with layers that see all, and experts whose SwiGLU is
// clamped and lets what it gates pass (Backend::ClampedSwiGlu).
//
// Thread safety: constants.
#pragma once

#include "models/architectures/experts.h"

namespace treadle {

inline constexpr auto kGptOssTensors = [] {
  constexpr auto kOthers = kQwen3MoeTensors;
  std::array<TensorRow, std::size(kOthers) + 1> rows = {};
  std::ranges::copy(kOthers, rows.begin());
  for (TensorRow& row : rows) {
    if (row.part == Part::kRouter) row.hugging_face = "mlp.router";
    if (row.part == Part::kFfnNorm) row.gguf = "post_attention_norm";
    if (row.part == Part::kRouter || InExperts(row.part)) row.bias = kQkvBias;  // all or none
  }
  rows.back() = {Part::kSinks, "attn_sinks", "self_attn.sinks", Extent::kHeads};
  return rows;
}();
inline constexpr JsonField kGptOssOwn[] = {
    {"head_dim", &ModelConfig::head_dim, [](const ModelConfig&) { return int64_t{64}; }}};
inline constexpr std::string_view kGptOssClasses[] = {"GptOssForCausalLM"};
inline constexpr FixedField kGptOssFixed[] = {{"hidden_act", "\"silu\""},
                                              {"attention_bias", "true"},
                                              {"swiglu_limit", "7.0"},
                                              {"swiglu_alpha", "1.702"}};

inline constexpr Architecture kGptOss = {.name = "gpt-oss",
                                         .layer = LlamaLayer,
                                         .tensors = kGptOssTensors,
                                         .qkv_bias = Presence::kAlways,
                                         .output_bias = Presence::kAlways,
                                         .local_layers = Presence::kAlways,
                                         .global_every = 2,
                                         .config_json = {.classes = kGptOssClasses,
                                                         .own = kGptOssOwn,
                                                         .fixed = kGptOssFixed,
                                                         .default_epsilon = 1e-5,
                                                         .default_rope_base = 150000,
                                                         .model_type = "gpt_oss"},
                                         .experts = true,
                                         .swiglu_limit = 7,
                                         .hugging_face_experts = FusedExperts::kByTurns,
                                         .yarn_truncates = false};

}  // namespace treadle
