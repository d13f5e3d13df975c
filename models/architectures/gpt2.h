// GPT-2 (Radford et al. 2019, section 2.3). Folders that were saved from the bare model lack the
// prefix of their names.
//
// Thread safety: constants and a pure function.
#pragma once

#include "models/architectures/architecture.h"

namespace treadle {

absl::Status Gpt2Layer(const LayerPass& pass, const LayerWeights& weights);

inline constexpr bool (*kGpt2Bias)(const ModelConfig&) = [](const ModelConfig&) { return true; };
inline constexpr TensorRow kGpt2Tensors[] = {
    {Part::kEmbedding, "token_embd", "wte", Extent::kVocab, Extent::kHidden},
    {Part::kPositions, "position_embd", "wpe", Extent::kContext, Extent::kHidden},
    {Part::kOutputNorm, "output_norm", "ln_f", Extent::kHidden, Extent::kNone, kGpt2Bias},
    {Part::kHead, "output", "lm_head", Extent::kVocab, Extent::kHidden},
    {Part::kAttentionNorm, "attn_norm", "ln_1", Extent::kHidden, Extent::kNone, kGpt2Bias},
    {Part::kQkv, "attn_qkv", "attn.c_attn", Extent::kFused, Extent::kHidden, kGpt2Bias},
    {Part::kAttentionOutput, "attn_output", "attn.c_proj", Extent::kHidden, Extent::kQueries,
     kGpt2Bias},
    {Part::kFfnNorm, "ffn_norm", "ln_2", Extent::kHidden, Extent::kNone, kGpt2Bias},
    {Part::kUp, "ffn_up", "mlp.c_fc", Extent::kInner, Extent::kHidden, kGpt2Bias},
    {Part::kDown, "ffn_down", "mlp.c_proj", Extent::kHidden, Extent::kInner, kGpt2Bias}};

inline constexpr JsonField kGpt2Own[] = {
    {"n_layer", &ModelConfig::layers},
    {"n_embd", &ModelConfig::hidden},
    {"n_head", &ModelConfig::heads},
    {nullptr, &ModelConfig::kv_heads},
    {"n_inner", &ModelConfig::ffn_hidden, [](const ModelConfig& c) { return 4 * c.hidden; }},
    {"n_positions", &ModelConfig::context, [](const ModelConfig&) { return int64_t{1024}; }}};
inline constexpr std::string_view kGpt2Classes[] = {"GPT2LMHeadModel"};
inline constexpr FixedField kGpt2Fixed[] = {{"activation_function", "\"gelu_new\""},
                                            {"scale_attn_weights", "true"},
                                            {"scale_attn_by_inverse_layer_idx", "false"}};

inline constexpr Architecture kGpt2 = {.name = "gpt2",
                                       .layer = Gpt2Layer,
                                       .tensors = kGpt2Tensors,
                                       .norm = NormKind::kLayer,
                                       .rotary = false,
                                       .qkv_bias = Presence::kAlways,
                                       .output_bias = Presence::kAlways,
                                       .grouped = false,
                                       .config_json = {.classes = kGpt2Classes,
                                                       .own = kGpt2Own,
                                                       .fixed = kGpt2Fixed,
                                                       .epsilon = "layer_norm_epsilon",
                                                       .default_epsilon = 1e-5,
                                                       .tied_head = true},
                                       .hugging_face_layers = "h.",
                                       .hugging_face_prefix = "transformer.",
                                       .hugging_face_transposed = true};

}  // namespace treadle
