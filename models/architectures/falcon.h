// Falcon (Almazrouei et al. 2023): GPT-NeoX's parallel layer without biases but in norms; K/V heads
// are few, and both halves may read one norm (7B) or each its own (40B, 180B). A model with ALiBi
// (falcon-rw) is refused.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/gpt_neox.h"

namespace treadle {

inline constexpr bool (*kOneNorm)(const ModelConfig&) = [](const ModelConfig& c) {
  return c.layer_norms == 1;
};
inline constexpr bool (*kTwoNorms)(const ModelConfig&) = [](const ModelConfig& c) {
  return c.layer_norms == 2;
};
inline constexpr TensorRow kFalconTensors[] = {
    {Part::kEmbedding, "token_embd", "transformer.word_embeddings", Extent::kVocab,
     Extent::kHidden},
    {Part::kOutputNorm, "output_norm", "transformer.ln_f", Extent::kHidden, Extent::kNone,
     kWithBias},
    {Part::kHead, "output", "lm_head", Extent::kVocab, Extent::kHidden},
    {Part::kAttentionNorm, "attn_norm", "input_layernorm", Extent::kHidden, Extent::kNone,
     kWithBias, kOneNorm},
    {Part::kAttentionNorm, "attn_norm_2", "ln_attn", Extent::kHidden, Extent::kNone, kWithBias,
     kTwoNorms},
    {Part::kFfnNorm, "attn_norm", "ln_mlp", Extent::kHidden, Extent::kNone, kWithBias, kTwoNorms},
    {Part::kQkv, "attn_qkv", "self_attention.query_key_value", Extent::kFused, Extent::kHidden},
    {Part::kAttentionOutput, "attn_output", "self_attention.dense", Extent::kHidden,
     Extent::kQueries},
    {Part::kUp, "ffn_up", "mlp.dense_h_to_4h", Extent::kInner, Extent::kHidden},
    {Part::kDown, "ffn_down", "mlp.dense_4h_to_h", Extent::kHidden, Extent::kInner}};

inline constexpr JsonField kFalconOwn[] = {
    {"new_decoder_architecture", &ModelConfig::counts_kv_heads,
     [](const ModelConfig&) { return int64_t{false}; }},
    {"num_kv_heads", &ModelConfig::kv_heads,
     [](const ModelConfig& c) { return c.counts_kv_heads ? c.heads : 1; },
     &ModelConfig::counts_kv_heads},
    {nullptr, &ModelConfig::head_dim},
    {"num_ln_in_parallel_attn", &ModelConfig::layer_norms,
     [](const ModelConfig& c) { return int64_t{c.counts_kv_heads ? 2 : 1}; },
     &ModelConfig::counts_kv_heads},
    {"ffn_hidden_size", &ModelConfig::ffn_hidden,
     [](const ModelConfig& c) { return 4 * c.hidden; }},
    {"max_position_embeddings", &ModelConfig::context,
     [](const ModelConfig&) { return int64_t{2048}; }}};
inline constexpr std::string_view kFalconClasses[] = {"FalconForCausalLM"};
inline constexpr FixedField kFalconFixed[] = {{"activation", "\"gelu\""},
                                              {"alibi", "false"},
                                              {"bias", "false"},
                                              {"multi_query", "true"},
                                              {"parallel_attn", "true"}};

inline constexpr Architecture kFalcon = {.name = "falcon",
                                         .layer = GptNeoXLayer,
                                         .tensors = kFalconTensors,
                                         .norm = NormKind::kLayer,
                                         .config_json = {.classes = kFalconClasses,
                                                         .own = kFalconOwn,
                                                         .fixed = kFalconFixed,
                                                         .epsilon = "layer_norm_epsilon",
                                                         .default_epsilon = 1e-5,
                                                         .tied_head = true},
                                         .hugging_face_layers = "transformer.h.",
                                         .hugging_face_qkv_by_heads = true,
                                         .gguf_second_norm = "attn_norm_2"};

}  // namespace treadle
