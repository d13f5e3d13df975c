// LFM2 and LFM2.5 (Liquid AI 2025): most layers are a short convolution between two gates, which
// keeps its last inputs alone; the others attend, as Qwen 3's do. The mixtures of experts have
// dense layers before them, and routers of sigmoids that choose with a bias.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/experts.h"

namespace treadle {

inline constexpr TensorRow kLfm2Tensors[] = {
    {Part::kEmbedding, "token_embd", "model.embed_tokens", Extent::kVocab, Extent::kHidden},
    {Part::kOutputNorm, "token_embd_norm", "model.embedding_norm", Extent::kHidden},
    {Part::kHead, "output", "lm_head", Extent::kVocab, Extent::kHidden},
    {Part::kAttentionNorm, "attn_norm", "operator_norm", Extent::kHidden},
    {Part::kQ, "attn_q", "self_attn.q_proj", Extent::kQueries, Extent::kHidden},
    {Part::kK, "attn_k", "self_attn.k_proj", Extent::kKeys, Extent::kHidden},
    {Part::kV, "attn_v", "self_attn.v_proj", Extent::kKeys, Extent::kHidden},
    {Part::kQNorm, "attn_q_norm", "self_attn.q_layernorm", Extent::kHeadDim},
    {Part::kKNorm, "attn_k_norm", "self_attn.k_layernorm", Extent::kHeadDim},
    {Part::kAttentionOutput, "attn_output", "self_attn.out_proj", Extent::kHidden,
     Extent::kQueries},
    {Part::kStateInput, "shortconv.in_proj", "conv.in_proj", Extent::kStateProducts,
     Extent::kHidden},
    {Part::kConvolution, "shortconv.conv", "conv.conv", Extent::kChannels, Extent::kTaps},
    {Part::kStateOutput, "shortconv.out_proj", "conv.out_proj", Extent::kHidden,
     Extent::kStateValues},
    {Part::kFfnNorm, "ffn_norm", "ffn_norm", Extent::kHidden},
    {Part::kGate, "ffn_gate", "feed_forward.w1", Extent::kInner, Extent::kHidden},
    {Part::kUp, "ffn_up", "feed_forward.w3", Extent::kInner, Extent::kHidden},
    {Part::kDown, "ffn_down", "feed_forward.w2", Extent::kHidden, Extent::kInner}};

inline constexpr JsonField kLfm2Own[] = {
    {.name = "block_ff_dim", .member = &ModelConfig::ffn_hidden, .also = "intermediate_size"},
    {"conv_L_cache", &ModelConfig::conv_taps, [](const ModelConfig&) { return int64_t{3}; }}};
inline constexpr std::string_view kLfm2Classes[] = {"Lfm2ForCausalLM"};
inline constexpr FixedField kLfm2Fixed[] = {{"conv_bias", "false"}, {"tie_embedding", "true"}};

inline constexpr Architecture kLfm2 = {.name = "lfm2",
                                       .layer = LlamaLayer,
                                       .tensors = kLfm2Tensors,
                                       .qk_norm = true,
                                       .states = StateKind::kConvolution,
                                       .config_json = {.classes = kLfm2Classes,
                                                       .own = kLfm2Own,
                                                       .fixed = kLfm2Fixed,
                                                       .epsilon = "norm_eps",
                                                       .default_epsilon = 1e-5,
                                                       .default_rope_base = 1e6,
                                                       .tied_head = true}};

inline constexpr auto kLfm2MoeTensors =
    Changed(Joined(Joined(std::to_array(kLfm2Tensors), std::to_array(kRouterBias)),
                   ExpertTensors("feed_forward.gate", "feed_forward.experts.*.w1",
                                 "feed_forward.experts.*.w3", "feed_forward.experts.*.w2")),
            [](TensorRow& row) {
              if (row.part == Part::kRouterBias) row.hugging_face = "feed_forward.expert_bias";
              InMixedLayers(row);
            });
inline constexpr JsonField kLfm2MoeOwn[] = {
    kLfm2Own[1],
    kQwen3MoeOwn[0],
    {"moe_intermediate_size", &ModelConfig::ffn_hidden},
    {"num_dense_layers", &ModelConfig::dense_layers, [](const ModelConfig&) { return int64_t{2}; }},
    {"norm_topk_prob", &ModelConfig::normalized_experts}};
inline constexpr std::string_view kLfm2MoeClasses[] = {"Lfm2MoeForCausalLM"};
inline constexpr FixedField kLfm2MoeFixed[] = {
    kLfm2Fixed[0], kLfm2Fixed[1], {"use_expert_bias", "true"}};

inline constexpr Architecture kLfm2Moe = [] {
  Architecture family = kLfm2;
  family.name = "lfm2moe";
  family.tensors = kLfm2MoeTensors;
  family.config_json.classes = kLfm2MoeClasses;
  family.config_json.own = kLfm2MoeOwn;
  family.config_json.fixed = kLfm2MoeFixed;
  family.config_json.model_type = "lfm2_moe";
  family.experts = true;
  family.dense_first = true;
  family.sigmoid_router = true;
  return family;
}();

}  // namespace treadle
