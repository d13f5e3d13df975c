// Gemma 3, the models of text (Gemma Team 2025, section 2): norms before and after both halves of a
// layer and on each head's queries and keys, GeGLU, a scaled embedding, and five layers that see a
// window of positions to one that sees all.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

namespace treadle {

inline constexpr TensorRow kGemmaTensors[] = {
    {Part::kEmbedding, "token_embd", "model.embed_tokens", Extent::kVocab, Extent::kHidden},
    {Part::kOutputNorm, "output_norm", "model.norm", Extent::kHidden},
    {Part::kHead, "output", "lm_head", Extent::kVocab, Extent::kHidden},
    {Part::kAttentionNorm, "attn_norm", "input_layernorm", Extent::kHidden},
    {Part::kQ, "attn_q", "self_attn.q_proj", Extent::kQueries, Extent::kHidden},
    {Part::kK, "attn_k", "self_attn.k_proj", Extent::kKeys, Extent::kHidden},
    {Part::kV, "attn_v", "self_attn.v_proj", Extent::kKeys, Extent::kHidden},
    {Part::kQNorm, "attn_q_norm", "self_attn.q_norm", Extent::kHeadDim},
    {Part::kKNorm, "attn_k_norm", "self_attn.k_norm", Extent::kHeadDim},
    {Part::kAttentionOutput, "attn_output", "self_attn.o_proj", Extent::kHidden, Extent::kQueries},
    {Part::kPostAttentionNorm, "post_attention_norm", "post_attention_layernorm", Extent::kHidden},
    {Part::kFfnNorm, "ffn_norm", "pre_feedforward_layernorm", Extent::kHidden},
    {Part::kGate, "ffn_gate", "mlp.gate_proj", Extent::kInner, Extent::kHidden},
    {Part::kUp, "ffn_up", "mlp.up_proj", Extent::kInner, Extent::kHidden},
    {Part::kDown, "ffn_down", "mlp.down_proj", Extent::kHidden, Extent::kInner},
    {Part::kPostFfnNorm, "post_ffw_norm", "post_feedforward_layernorm", Extent::kHidden}};

inline constexpr JsonField kGemmaOwn[] = {{"num_key_value_heads", &ModelConfig::kv_heads},
                                          {"head_dim", &ModelConfig::head_dim},
                                          {"query_pre_attn_scalar", &ModelConfig::query_scalar,
                                           [](const ModelConfig&) { return int64_t{256}; }}};
inline constexpr std::string_view kGemma3Classes[] = {"Gemma3ForCausalLM"};
inline constexpr FixedField kGemmaFixed[] = {{"hidden_activation", "\"gelu_pytorch_tanh\""},
                                             {"attention_bias", "false"},
                                             {"use_bidirectional_attention", "false"},
                                             {"attn_logit_softcapping", "null"},
                                             {"final_logit_softcapping", "null"}};

inline constexpr Architecture kGemma3 = {
    .name = "gemma3",
    .layer = LlamaLayer,
    .tensors = kGemmaTensors,
    .qk_norm = true,
    .embedding_scaled = true,
    .local_layers = Presence::kAlways,
    .global_every = 6,
    .local_base = true,
    .geglu = true,
    // The model of 27B divides by its hidden size per head.
    .gguf_query_scalar =
        [](const ModelConfig& c) { return c.layers == 62 ? c.hidden / c.heads : c.head_dim; },
    .config_json = {.classes = kGemma3Classes,
                    .own = kGemmaOwn,
                    .fixed = kGemmaFixed,
                    .default_rope_base = 1e6,
                    .tied_head = true,
                    .model_type = "gemma3_text"},
    .hugging_face_gain = 1};

}  // namespace treadle
