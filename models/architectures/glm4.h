// GLM-4-0414 (GLM Team 2025): norms before and after both halves of a layer, one matrix for the
// gate and what it gates, and half of each head rotates, in adjacent pairs, which files of both
// kinds keep side by side.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

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

}  // namespace treadle
