// Gemma 4, the models of text (Google DeepMind 2026: E2B, E4B, 31B, 26B-A4B): Gemma 3's norms,
// GeGLU and layers in turn, but that global layers have heads of another size, of which a quarter
// rotates, values are normalized, layers read the K/V of earlier ones and get an embedding of their
// own, and logits are capped. Layers of 26B-A4B have experts beside the dense network: both, and
// the router, read the residual stream by norms of their own, and what both make is normalized
// before it is added.
//
// Thread safety: constants and a pure function.
#pragma once

#include "models/architectures/experts.h"
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

inline constexpr auto kGemma4MoeTensors = [] {
  constexpr std::array<TensorRow, 5> kOwn = {
      {Bare(Part::kRouterNorm, "ffn_gate_inp.scale", "router.scale", Extent::kHidden),
       Bare(Part::kExpertScale, "ffn_down_exps.scale", "router.per_expert_scale", Extent::kExperts),
       {Part::kExpertNorm, "pre_ffw_norm_2", "pre_feedforward_layernorm_2", Extent::kHidden},
       {Part::kPostDenseNorm, "post_ffw_norm_1", "post_feedforward_layernorm_1", Extent::kHidden},
       {Part::kPostExpertNorm, "post_ffw_norm_2", "post_feedforward_layernorm_2",
        Extent::kHidden}}};
  constexpr auto kExperts = ExpertTensors("router.proj", "experts.*.gate_proj", "experts.*.up_proj",
                                          "experts.*.down_proj");
  return Changed(Joined(Joined(kGemma4Tensors, kExperts), kOwn), [](TensorRow& row) {
    if (row.part == Part::kGate) row.part = Part::kSharedGate, row.rows = Extent::kSharedInner;
    if (row.part == Part::kUp) row.part = Part::kSharedUp, row.rows = Extent::kSharedInner;
    if (row.part == Part::kDown) row.part = Part::kSharedDown, row.columns = Extent::kSharedInner;
  });
}();
inline constexpr auto kGemma4MoeOwn = [] {
  constexpr JsonField kOfExperts[] = {{"moe_intermediate_size", &ModelConfig::ffn_hidden},
                                      {"intermediate_size", &ModelConfig::shared_hidden},
                                      {"num_experts", &ModelConfig::experts},
                                      {"top_k_experts", &ModelConfig::experts_per_token}};
  std::array<JsonField, std::size(kGemma4Own) + std::size(kOfExperts)> own = {};
  std::ranges::copy(kOfExperts, std::ranges::copy(kGemma4Own, own.begin()).out);
  return own;
}();
inline constexpr FixedField kGemma4MoeFixed[] = {kGemma4Fixed[0],
                                                 kGemma4Fixed[1],
                                                 {"enable_moe_block", "true", true},
                                                 kGemma4Fixed[3],
                                                 {"use_double_wide_mlp", "false"}};

inline constexpr Architecture kGemma4Moe = [] {
  Architecture family = kGemma4;
  family.name = "gemma4moe";
  family.gguf_name = "gemma4";
  family.tensors = kGemma4MoeTensors;
  family.config_json.own = kGemma4MoeOwn;
  family.config_json.fixed = kGemma4MoeFixed;
  family.experts = true;
  family.shared_expert = true;
  family.hugging_face_experts = FusedExperts::kByHalves;
  return family;
}();

}  // namespace treadle
