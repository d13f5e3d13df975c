// OPT (Zhang et al. 2022), of the kind with a norm before each half of a layer (all sizes but 350m,
// which also embeds tokens in fewer features: both are refused). llama.cpp has no OPT: names in
// .gguf files are ours, after its customs.
//
// Thread safety: constants and a pure function.
#pragma once

#include "models/architectures/gpt_neox.h"

namespace treadle {

absl::Status OptLayer(const LayerPass& pass, const LayerWeights& weights);

inline constexpr TensorRow kOptTensors[] = {
    {Part::kEmbedding, "token_embd", "model.decoder.embed_tokens", Extent::kVocab, Extent::kHidden},
    {Part::kPositions, "position_embd", "model.decoder.embed_positions", Extent::kContext,
     Extent::kHidden},
    {Part::kOutputNorm, "output_norm", "model.decoder.final_layer_norm", Extent::kHidden,
     Extent::kNone, kWithBias},
    {Part::kHead, "output", "lm_head", Extent::kVocab, Extent::kHidden},
    {Part::kAttentionNorm, "attn_norm", "self_attn_layer_norm", Extent::kHidden, Extent::kNone,
     kWithBias},
    {Part::kQ, "attn_q", "self_attn.q_proj", Extent::kQueries, Extent::kHidden, kWithBias},
    {Part::kK, "attn_k", "self_attn.k_proj", Extent::kKeys, Extent::kHidden, kWithBias},
    {Part::kV, "attn_v", "self_attn.v_proj", Extent::kKeys, Extent::kHidden, kWithBias},
    {Part::kAttentionOutput, "attn_output", "self_attn.out_proj", Extent::kHidden, Extent::kQueries,
     kWithBias},
    {Part::kFfnNorm, "ffn_norm", "final_layer_norm", Extent::kHidden, Extent::kNone, kWithBias},
    {Part::kUp, "ffn_up", "fc1", Extent::kInner, Extent::kHidden, kWithBias},
    {Part::kDown, "ffn_down", "fc2", Extent::kHidden, Extent::kInner, kWithBias}};

inline constexpr JsonField kOptOwn[] = {{nullptr, &ModelConfig::kv_heads},
                                        {"ffn_dim", &ModelConfig::ffn_hidden}};
inline constexpr JsonField kOptRepeated[] = {{"word_embed_proj_dim", &ModelConfig::hidden}};
inline constexpr std::string_view kOptClasses[] = {"OPTForCausalLM"};
inline constexpr FixedField kOptFixed[] = {{"activation_function", "\"relu\""},
                                           {"do_layer_norm_before", "true"},
                                           {"enable_bias", "true"},
                                           {"layer_norm_elementwise_affine", "true"},
                                           {"_remove_final_layer_norm", "false"}};

inline constexpr Architecture kOpt = {.name = "opt",
                                      .layer = OptLayer,
                                      .tensors = kOptTensors,
                                      .norm = NormKind::kLayer,
                                      .rotary = false,
                                      .qkv_bias = Presence::kAlways,
                                      .output_bias = Presence::kAlways,
                                      .grouped = false,
                                      .config_json = {.classes = kOptClasses,
                                                      .own = kOptOwn,
                                                      .fixed = kOptFixed,
                                                      .epsilon = nullptr,
                                                      .default_epsilon = 1e-5,
                                                      .tied_head = true,
                                                      .repeated = kOptRepeated},
                                      .hugging_face_layers = "model.decoder.layers.",
                                      .position_offset = 2,
                                      .gguf_elsewhere = false};

}  // namespace treadle
