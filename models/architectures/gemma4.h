// Gemma 4, the models of text (Google DeepMind 2026: E2B, E4B, 31B): Gemma 3's norms, GeGLU and
// layers in turn, but that global layers have heads of another size, of which a quarter rotates,
// values are normalized, layers read the K/V of earlier ones and get an embedding of their own, and
// logits are capped.
//
// Thread safety: constants and a pure function.
#pragma once

#include "models/architectures/gemma.h"

namespace treadle {

absl::Status Gemma4Layer(const LayerPass& pass, const LayerWeights& weights);

inline constexpr auto kGemma4Tensors = [] {
  constexpr bool (*kEmbeds)(const ModelConfig&) = [](const ModelConfig& c) {
    return c.layer_embedding > 0;
  };
  constexpr TensorRow kOwn[] = {
      {Part::kLayerEmbedding, "per_layer_token_embd", "model.embed_tokens_per_layer",
       Extent::kTokens, Extent::kLayerInputs, nullptr, kEmbeds},
      {Part::kLayerInputProjection, "per_layer_model_proj", "model.per_layer_model_projection",
       Extent::kLayerInputs, Extent::kHidden, nullptr, kEmbeds},
      {Part::kLayerInputNorm, "per_layer_proj_norm", "model.per_layer_projection_norm",
       Extent::kLayerInput, Extent::kNone, nullptr, kEmbeds},
      {Part::kInputGate, "inp_gate", "per_layer_input_gate", Extent::kLayerInput, Extent::kHidden,
       nullptr, kEmbeds},
      {Part::kInputProjection, "proj", "per_layer_projection", Extent::kHidden, Extent::kLayerInput,
       nullptr, kEmbeds},
      {Part::kPostInputNorm, "post_norm", "post_per_layer_input_norm", Extent::kHidden,
       Extent::kNone, nullptr, kEmbeds},
      {Part::kLayerScale, "layer_output_scale", "layer_scalar", Extent::kOne}};
  std::array<TensorRow, std::size(kGemmaTensors) + std::size(kOwn)> rows = {};
  std::ranges::copy(kOwn, std::ranges::copy(kGemmaTensors, rows.begin()).out);
  for (TensorRow& row : rows) {
    if (row.part == Part::kK || row.part == Part::kKNorm) {
      row.in_layer = [](const ModelConfig& c, int64_t layer) { return c.HasKv(layer); };
    }
    if (row.part == Part::kV) {
      row.in_layer = [](const ModelConfig& c, int64_t layer) {
        return c.HasKv(layer) && !(c.keys_are_values && !c.Local(layer));
      };
    }
  }
  return rows;
}();

// In the order of config_fields.cc: what counts comes before what it decides.
inline constexpr JsonField kGemma4Own[] = {
    {"attention_k_eq_v", &ModelConfig::keys_are_values},
    {"num_key_value_heads", &ModelConfig::local_kv_heads},
    {"num_global_key_value_heads", &ModelConfig::kv_heads,
     [](const ModelConfig& c) { return c.local_kv_heads; }, &ModelConfig::keys_are_values},
    {"head_dim", &ModelConfig::local_head_dim, [](const ModelConfig&) { return int64_t{256}; }},
    {"global_head_dim", &ModelConfig::head_dim, [](const ModelConfig&) { return int64_t{512}; }},
    {nullptr, &ModelConfig::query_scalar, [](const ModelConfig&) { return int64_t{1}; }}};
inline constexpr JsonField kGemma4Repeated[] = {
    {"vocab_size_per_layer_input", &ModelConfig::vocab}};
inline constexpr std::string_view kGemma4Classes[] = {"Gemma4ForCausalLM",
                                                      "Gemma4ForConditionalGeneration"};
inline constexpr FixedField kGemma4Fixed[] = {{"hidden_activation", "\"gelu_pytorch_tanh\""},
                                              {"attention_bias", "false"},
                                              {"enable_moe_block", "false"},
                                              {"use_bidirectional_attention", "null"}};

inline constexpr Architecture kGemma4 = {
    .name = "gemma4",
    .layer = Gemma4Layer,
    .tensors = kGemma4Tensors,
    .qk_norm = true,
    .embedding_multiplied = true,
    .local_layers = Presence::kAlways,
    .global_every = 6,
    .local_base = true,
    .local_heads = true,
    .values_normalized = true,
    .geglu = true,
    .gguf_query_scalar = [](const ModelConfig&) { return int64_t{1}; },
    .config_json = {.classes = kGemma4Classes,
                    .own = kGemma4Own,
                    .fixed = kGemma4Fixed,
                    .default_rope_base = 1e6,
                    .tied_head = true,
                    .model_type = "gemma4_text",
                    .repeated = kGemma4Repeated}};

}  // namespace treadle
