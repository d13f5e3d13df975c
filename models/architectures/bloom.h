// BLOOM (BigScience Workshop 2022, section 3.2): GPT-2's layer without positions; scores fall with
// the distance instead (ALiBi), and the embedding is normalized. Folders that were saved from the
// bare model lack the prefix of their names.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/gpt2.h"

namespace treadle {

inline constexpr TensorRow kBloomTensors[] = {
    {Part::kEmbedding, "token_embd", "word_embeddings", Extent::kVocab, Extent::kHidden},
    {Part::kEmbeddingNorm, "token_embd_norm", "word_embeddings_layernorm", Extent::kHidden,
     Extent::kNone, kGpt2Bias},
    {Part::kOutputNorm, "output_norm", "ln_f", Extent::kHidden, Extent::kNone, kGpt2Bias},
    {Part::kHead, "output", "lm_head", Extent::kVocab, Extent::kHidden},
    {Part::kAttentionNorm, "attn_norm", "input_layernorm", Extent::kHidden, Extent::kNone,
     kGpt2Bias},
    {Part::kQkv, "attn_qkv", "self_attention.query_key_value", Extent::kFused, Extent::kHidden,
     kGpt2Bias},
    {Part::kAttentionOutput, "attn_output", "self_attention.dense", Extent::kHidden,
     Extent::kQueries, kGpt2Bias},
    {Part::kFfnNorm, "ffn_norm", "post_attention_layernorm", Extent::kHidden, Extent::kNone,
     kGpt2Bias},
    {Part::kUp, "ffn_up", "mlp.dense_h_to_4h", Extent::kInner, Extent::kHidden, kGpt2Bias},
    {Part::kDown, "ffn_down", "mlp.dense_4h_to_h", Extent::kHidden, Extent::kInner, kGpt2Bias}};

// Published files have the second names.
inline constexpr JsonField kBloomOwn[] = {
    {.name = "n_layer", .member = &ModelConfig::layers, .also = "num_hidden_layers"},
    {.name = "hidden_size", .member = &ModelConfig::hidden, .also = "n_embed"},
    {.name = "n_head", .member = &ModelConfig::heads, .also = "num_attention_heads"},
    {nullptr, &ModelConfig::kv_heads},
    {"n_inner", &ModelConfig::ffn_hidden, [](const ModelConfig& c) { return 4 * c.hidden; }},
    {"seq_length", &ModelConfig::context, [](const ModelConfig&) { return int64_t{2048}; }}};
inline constexpr std::string_view kBloomClasses[] = {"BloomForCausalLM"};
inline constexpr FixedField kBloomFixed[] = {{"apply_residual_connection_post_layernorm", "false"}};

inline constexpr Architecture kBloom = {.name = "bloom",
                                        .layer = Gpt2Layer,
                                        .tensors = kBloomTensors,
                                        .norm = NormKind::kLayer,
                                        .rotary = false,
                                        .alibi = true,
                                        .qkv_bias = Presence::kAlways,
                                        .output_bias = Presence::kAlways,
                                        .grouped = false,
                                        .config_json = {.classes = kBloomClasses,
                                                        .own = kBloomOwn,
                                                        .fixed = kBloomFixed,
                                                        .epsilon = "layer_norm_epsilon",
                                                        .default_epsilon = 1e-5,
                                                        .tied_head = true},
                                        .hugging_face_layers = "h.",
                                        .hugging_face_prefix = "transformer.",
                                        .hugging_face_qkv_by_heads = true};

}  // namespace treadle
