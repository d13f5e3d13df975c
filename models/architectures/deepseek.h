// Models with latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): DeepSeek V2 and V2
// Lite, whose routers look at the experts of a few groups; V3, R1 and Kimi K2, whose routers score
// by sigmoids and choose with a bias (DeepSeek-V3, section 2.1.2); GLM-4.7-Flash, V3 of other
// sizes. Their first layers are dense, and experts for all rows lie side by side as one network.
//
// Both kinds of file keep rotated features in adjacent pairs, behind the others. Folders and older
// .gguf files keep the matrices that make keys and values of a latent as one (latent_tensors.h).
//
// Thread safety: constants.
#pragma once

#include "models/architectures/glm4.h"

namespace treadle {

inline constexpr bool (*kQueryLatents)(const ModelConfig&) = [](const ModelConfig& c) {
  return c.query_latent_dim > 0;
};
inline constexpr std::array<TensorRow, 12> kLatentAttention = {
    {{Part::kEmbedding, "token_embd", "model.embed_tokens", Extent::kVocab, Extent::kHidden},
     {Part::kOutputNorm, "output_norm", "model.norm", Extent::kHidden},
     {Part::kHead, "output", "lm_head", Extent::kVocab, Extent::kHidden},
     {Part::kAttentionNorm, "attn_norm", "input_layernorm", Extent::kHidden},
     {Part::kQueryDown, "attn_q_a", "self_attn.q_a_proj", Extent::kQueryLatent, Extent::kHidden,
      nullptr, kQueryLatents},
     {Part::kQueryDownNorm, "attn_q_a_norm", "self_attn.q_a_layernorm", Extent::kQueryLatent,
      Extent::kNone, nullptr, kQueryLatents},
     {Part::kQ, "attn_q_b", "self_attn.q_b_proj", Extent::kOwnQueries, Extent::kQueryLatent,
      nullptr, kQueryLatents},
     {Part::kQ, "attn_q", "self_attn.q_proj", Extent::kOwnQueries, Extent::kHidden, nullptr,
      [](const ModelConfig& c) { return c.query_latent_dim == 0; }},
     {Part::kK, "attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", Extent::kKeys, Extent::kHidden},
     {Part::kLatentNorm, "attn_kv_a_norm", "self_attn.kv_a_layernorm", Extent::kLatent},
     {Part::kKeyUp, "attn_k_b", "self_attn.k_b_proj", Extent::kLatentQueries, Extent::kUnrotated},
     {Part::kValueUp, "attn_v_b", "self_attn.v_b_proj", Extent::kOwnValues, Extent::kLatent}}};
// GLM-4.5's network behind it.
inline constexpr auto kDeepseek3Tensors = [] {
  constexpr auto kIsFfn = [](const TensorRow& row) { return row.part >= Part::kAttentionOutput; };
  std::array<TensorRow, kLatentAttention.size() + std::ranges::count_if(kGlm4MoeTensors, kIsFfn)>
      rows = {};
  std::ranges::copy_if(kGlm4MoeTensors, std::ranges::copy(kLatentAttention, rows.begin()).out,
                       kIsFfn);
  for (TensorRow& row : rows) {
    if (row.part == Part::kAttentionOutput) row.columns = Extent::kOwnValues;
    if (row.part == Part::kFfnNorm) row.gguf = "ffn_norm";
    if (row.part >= Part::kSharedRouter && row.part <= Part::kSharedDown) {
      row.present = [](const ModelConfig& c) { return c.shared_hidden > 0; };
    }
  }
  return rows;
}();
inline constexpr auto kDeepseek2Tensors = [] {
  constexpr auto kStays = [](const TensorRow& row) { return row.part != Part::kRouterBias; };
  std::array<TensorRow, kDeepseek3Tensors.size() - 1> rows = {};
  std::ranges::copy_if(kDeepseek3Tensors, rows.begin(), kStays);
  return rows;
}();

// Sizes that these families call alike; kDenseLayers: dense_layers, where a file leaves it out.
template <int64_t kDenseLayers>
inline constexpr JsonField kDeepseekOwn[] = {
    {nullptr, &ModelConfig::kv_heads, [](const ModelConfig&) { return int64_t{1}; }},
    {nullptr, &ModelConfig::head_dim},
    {"qk_rope_head_dim", &ModelConfig::rope_dim},
    {"n_routed_experts", &ModelConfig::experts},
    {"moe_intermediate_size", &ModelConfig::ffn_hidden},
    {nullptr, &ModelConfig::shared_hidden, [](const ModelConfig&) { return int64_t{0}; }},
    {"first_k_dense_replace", &ModelConfig::dense_layers,
     [](const ModelConfig&) { return kDenseLayers; }},
    {"norm_topk_prob", &ModelConfig::normalized_experts}};
inline constexpr JsonField kDeepseekRepeated[] = {{"num_key_value_heads", &ModelConfig::heads}};

inline constexpr std::string_view kDeepseek2Classes[] = {"DeepseekV2ForCausalLM"};
inline constexpr FixedField kDeepseek2Fixed[] = {
    {"hidden_act", "\"silu\""}, {"attention_bias", "false"},     {"mlp_bias", "false"},
    {"moe_layer_freq", "1"},    {"scoring_func", "\"softmax\""}, {"norm_topk_prob", "false"}};
inline constexpr Architecture kDeepseek2 = {.name = "deepseek2",
                                            .layer = LlamaLayer,
                                            .tensors = kDeepseek2Tensors,
                                            .config_json = {.classes = kDeepseek2Classes,
                                                            .own = kDeepseekOwn<0>,
                                                            .fixed = kDeepseek2Fixed,
                                                            .model_type = "deepseek_v2",
                                                            .repeated = kDeepseekRepeated},
                                            .gguf_pairs = true,
                                            .hugging_face_pairs = true,
                                            .experts = true,
                                            .dense_first = true,
                                            .shared_expert = true,
                                            .grouped_experts = true,
                                            .latent = true,
                                            .unnormalized_experts = true};

inline constexpr std::string_view kDeepseek3Classes[] = {"DeepseekV3ForCausalLM",
                                                         "Glm4MoeLiteForCausalLM"};
inline constexpr FixedField kDeepseek3Fixed[] = {
    {"hidden_act", "\"silu\""},      {"attention_bias", "false"},     {"moe_layer_freq", "1"},
    {"scoring_func", "\"sigmoid\""}, {"topk_method", "\"noaux_tc\""}, {"rope_interleave", "true"}};
inline constexpr Architecture kDeepseek3 = [] {
  Architecture family = kDeepseek2;
  family.name = "deepseek3";
  family.gguf_name = "deepseek2";
  family.tensors = kDeepseek3Tensors;
  family.config_json.classes = kDeepseek3Classes;
  family.config_json.own = kDeepseekOwn<3>;
  family.config_json.fixed = kDeepseek3Fixed;
  family.config_json.model_type = "deepseek_v3";
  family.sigmoid_router = true;
  family.unnormalized_experts = false;
  return family;
}();

}  // namespace treadle
