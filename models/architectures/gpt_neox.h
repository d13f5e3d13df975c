// GPT-NeoX (Black et al. 2022), and Pythia (Biderman et al. 2023): both halves of a layer read what
// the layer was given, unless config.json says otherwise, and a part of each head rotates.
//
// Thread safety: constants and a pure function.
#pragma once

#include "models/architectures/architecture.h"

namespace treadle {

// Falcon's, too.
absl::Status GptNeoXLayer(const LayerPass& pass, const LayerWeights& weights);

inline constexpr bool (*kWithBias)(const ModelConfig&) = [](const ModelConfig&) { return true; };
inline constexpr TensorRow kGptNeoXTensors[] = {
    {Part::kEmbedding, "token_embd", "gpt_neox.embed_in", Extent::kVocab, Extent::kHidden},
    {Part::kOutputNorm, "output_norm", "gpt_neox.final_layer_norm", Extent::kHidden, Extent::kNone,
     kWithBias},
    {Part::kHead, "output", "embed_out", Extent::kVocab, Extent::kHidden},
    {Part::kAttentionNorm, "attn_norm", "input_layernorm", Extent::kHidden, Extent::kNone,
     kWithBias},
    {Part::kQkv, "attn_qkv", "attention.query_key_value", Extent::kFused, Extent::kHidden,
     kWithBias},
    {Part::kAttentionOutput, "attn_output", "attention.dense", Extent::kHidden, Extent::kQueries,
     kWithBias},
    {Part::kFfnNorm, "ffn_norm", "post_attention_layernorm", Extent::kHidden, Extent::kNone,
     kWithBias},
    {Part::kUp, "ffn_up", "mlp.dense_h_to_4h", Extent::kInner, Extent::kHidden, kWithBias},
    {Part::kDown, "ffn_down", "mlp.dense_4h_to_h", Extent::kHidden, Extent::kInner, kWithBias}};

inline constexpr JsonField kGptNeoXOwn[] = {
    {nullptr, &ModelConfig::kv_heads},
    {nullptr, &ModelConfig::head_dim},
    {"use_parallel_residual", &ModelConfig::parallel_residual,
     [](const ModelConfig&) { return int64_t{true}; }}};
inline constexpr std::string_view kGptNeoXClasses[] = {"GPTNeoXForCausalLM"};
inline constexpr FixedField kGptNeoXFixed[] = {{"hidden_act", "\"gelu\""},
                                               {"attention_bias", "true"}};

inline constexpr Architecture kGptNeoX = {.name = "gptneox",
                                          .layer = GptNeoXLayer,
                                          .tensors = kGptNeoXTensors,
                                          .norm = NormKind::kLayer,
                                          .qkv_bias = Presence::kAlways,
                                          .output_bias = Presence::kAlways,
                                          .grouped = false,
                                          .config_json = {.classes = kGptNeoXClasses,
                                                          .own = kGptNeoXOwn,
                                                          .fixed = kGptNeoXFixed,
                                                          .epsilon = "layer_norm_eps",
                                                          .default_epsilon = 1e-5,
                                                          .model_type = "gpt_neox",
                                                          .rope_base = "rotary_emb_base",
                                                          .rotary_share = "rotary_pct",
                                                          .default_rotary_share = 0.25},
                                          .hugging_face_layers = "gpt_neox.layers.",
                                          .hugging_face_qkv_by_heads = true};

}  // namespace treadle
