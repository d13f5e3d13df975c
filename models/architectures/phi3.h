// Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024; without experts or vision): Llama's layer, with one
// matrix for Q, K and V and one for the gate and what it gates; long contexts by LongRoPE.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

namespace treadle {

inline constexpr TensorRow kPhi3Tensors[] = {
    {Part::kEmbedding, "token_embd", "model.embed_tokens", Extent::kVocab, Extent::kHidden},
    {Part::kOutputNorm, "output_norm", "model.norm", Extent::kHidden},
    {Part::kHead, "output", "lm_head", Extent::kVocab, Extent::kHidden},
    {Part::kAttentionNorm, "attn_norm", "input_layernorm", Extent::kHidden},
    {Part::kQkv, "attn_qkv", "self_attn.qkv_proj", Extent::kFused, Extent::kHidden},
    {Part::kAttentionOutput, "attn_output", "self_attn.o_proj", Extent::kHidden, Extent::kQueries},
    {Part::kFfnNorm, "ffn_norm", "post_attention_layernorm", Extent::kHidden},
    {Part::kGateUp, "ffn_up", "mlp.gate_up_proj", Extent::kGateUp, Extent::kHidden},
    {Part::kDown, "ffn_down", "mlp.down_proj", Extent::kHidden, Extent::kInner}};
inline constexpr std::string_view kPhi3Classes[] = {"Phi3ForCausalLM"};
inline constexpr FixedField kPhi3Fixed[] = {{"hidden_act", "\"silu\""}};

inline constexpr Architecture kPhi3 = {.name = "phi3",
                                       .layer = LlamaLayer,
                                       .tensors = kPhi3Tensors,
                                       .config_json = {.classes = kPhi3Classes,
                                                       .fixed = kPhi3Fixed,
                                                       .default_epsilon = 1e-5,
                                                       .rotary_share = "partial_rotary_factor"}};

}  // namespace treadle
