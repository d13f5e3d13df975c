// GLM-4-0414 (GLM Team 2025): norms before and after both halves of a layer, one matrix for the
// gate and what it gates, and half of each head rotates, in adjacent pairs, which files of both
// kinds keep side by side. GLM-4.5 to 4.7 (Zeng et al. 2025, section 2.1): Llama's layer with
// mixtures of experts behind one or a few dense layers, and an expert for all rows; routers score
// by sigmoids and choose with a bias.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/experts.h"

namespace treadle {

inline constexpr TensorRow kGlm4Tensors[] = {
    {Part::kEmbedding, "token_embd", "model.embed_tokens", Extent::kVocab, Extent::kHidden},
    {Part::kOutputNorm, "output_norm", "model.norm", Extent::kHidden},
    {Part::kHead, "output", "lm_head", Extent::kVocab, Extent::kHidden},
    {Part::kAttentionNorm, "attn_norm", "input_layernorm", Extent::kHidden},
    {Part::kQ, "attn_q", "self_attn.q_proj", Extent::kQueries, Extent::kHidden, kQkvBias},
    {Part::kK, "attn_k", "self_attn.k_proj", Extent::kKeys, Extent::kHidden, kQkvBias},
    {Part::kV, "attn_v", "self_attn.v_proj", Extent::kKeys, Extent::kHidden, kQkvBias},
    {Part::kAttentionOutput, "attn_output", "self_attn.o_proj", Extent::kHidden, Extent::kQueries},
    {Part::kPostAttentionNorm, "post_attention_norm", "post_self_attn_layernorm", Extent::kHidden},
    {Part::kFfnNorm, "ffn_norm", "post_attention_layernorm", Extent::kHidden},
    {Part::kGateUp, "ffn_up", "mlp.gate_up_proj", Extent::kGateUp, Extent::kHidden},
    {Part::kDown, "ffn_down", "mlp.down_proj", Extent::kHidden, Extent::kInner},
    {Part::kPostFfnNorm, "post_ffw_norm", "post_mlp_layernorm", Extent::kHidden}};
inline constexpr std::string_view kGlm4Classes[] = {"Glm4ForCausalLM"};
inline constexpr FixedField kGlm4Fixed[] = {{"hidden_act", "\"silu\""}};

inline constexpr Architecture kGlm4 = {.name = "glm4",
                                       .layer = LlamaLayer,
                                       .tensors = kGlm4Tensors,
                                       .qkv_bias = Presence::kAsStored,
                                       .config_json = {.classes = kGlm4Classes,
                                                       .fixed = kGlm4Fixed,
                                                       .default_epsilon = 1.5625e-7,
                                                       .rotary_share = "partial_rotary_factor",
                                                       .default_rotary_share = 0.5},
                                       .gguf_pairs = true,
                                       .hugging_face_pairs = true};

inline constexpr auto kGlm4MoeTensors = [] {
  constexpr auto kShared =
      Changed(std::array{kSharedExpert[1], kSharedExpert[2], kSharedExpert[3]}, [](TensorRow& row) {
        row.hugging_face = row.part == Part::kSharedGate ? "mlp.shared_experts.gate_proj"
                           : row.part == Part::kSharedUp ? "mlp.shared_experts.up_proj"
                                                         : "mlp.shared_experts.down_proj";
      });
  constexpr auto kAll = Joined(Joined(std::to_array(kLlamaTensors), std::to_array(kRouterBias)),
                               Joined(kQwenExperts, kShared));
  return Changed(kAll, [](TensorRow& row) {
    if (row.part == Part::kFfnNorm) row.gguf = "post_attention_norm";
    if (row.part == Part::kAttentionOutput) row.bias = nullptr;
    if (row.part == Part::kQNorm || row.part == Part::kKNorm) {
      row.present = [](const ModelConfig& c) { return c.head_norms; };
    }
    InMixedLayers(row);
  });
}();
inline constexpr JsonField kGlm4MoeOwn[] = {
    {"n_routed_experts", &ModelConfig::experts},
    {"moe_intermediate_size", &ModelConfig::ffn_hidden},
    {nullptr, &ModelConfig::shared_hidden, [](const ModelConfig& c) { return c.ffn_hidden; }},
    {"first_k_dense_replace", &ModelConfig::dense_layers,
     [](const ModelConfig&) { return int64_t{1}; }},
    {"norm_topk_prob", &ModelConfig::normalized_experts},
    {"use_qk_norm", &ModelConfig::head_norms, [](const ModelConfig&) { return int64_t{false}; }}};
inline constexpr std::string_view kGlm4MoeClasses[] = {"Glm4MoeForCausalLM"};
inline constexpr FixedField kGlm4MoeFixed[] = {
    {"hidden_act", "\"silu\""}, {"n_shared_experts", "1"}, {"n_group", "1"}, {"topk_group", "1"}};

inline constexpr Architecture kGlm4Moe = {.name = "glm4moe",
                                          .layer = LlamaLayer,
                                          .tensors = kGlm4MoeTensors,
                                          .qkv_bias = Presence::kAsStored,
                                          .qk_norm = true,
                                          .config_json = {.classes = kGlm4MoeClasses,
                                                          .own = kGlm4MoeOwn,
                                                          .fixed = kGlm4MoeFixed,
                                                          .default_epsilon = 1e-5,
                                                          .model_type = "glm4_moe",
                                                          .rotary_share = "partial_rotary_factor",
                                                          .default_rotary_share = 0.5},
                                          .experts = true,
                                          .dense_first = true,
                                          .shared_expert = true,
                                          .sigmoid_router = true};

}  // namespace treadle
