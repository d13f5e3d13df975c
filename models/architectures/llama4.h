// Llama 4, text (Meta 2025): three of four layers rotate and attend within chunks, with a norm
// without gains on each head's queries and keys behind the rotation; the queries of each fourth
// grow with their position (Nakanishi 2025). A row goes to one expert, which reads it multiplied by
// the sigmoid of the expert's logit, and to one for all rows; Maverick has such layers and dense
// ones by turns.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/experts.h"
#include "models/architectures/llama_like.h"

namespace treadle {

inline constexpr auto kLlama4Tensors = [] {
  constexpr auto kExperts =
      ExpertTensors("feed_forward.router", "feed_forward.experts.*.gate_proj",
                    "feed_forward.experts.*.up_proj", "feed_forward.experts.*.down_proj");
  constexpr std::array kShared = {kSharedExpert[1], kSharedExpert[2], kSharedExpert[3]};
  return Changed(Joined(Joined(std::to_array(kLlamaTensors), kExperts), kShared),
                 [](TensorRow& row) {
                   if (row.part == Part::kGate) row.hugging_face = "feed_forward.gate_proj";
                   if (row.part == Part::kUp) row.hugging_face = "feed_forward.up_proj";
                   if (row.part == Part::kDown) row.hugging_face = "feed_forward.down_proj";
                   if (row.part == Part::kSharedGate) {
                     row.hugging_face = "feed_forward.shared_expert.gate_proj";
                   }
                   if (row.part == Part::kSharedUp)
                     row.hugging_face = "feed_forward.shared_expert.up_proj";
                   if (row.part == Part::kSharedDown) {
                     row.hugging_face = "feed_forward.shared_expert.down_proj";
                   }
                   InMixedLayers(row);
                 });
}();
inline constexpr JsonField kLlama4Own[] = {
    kSmolLm3Own[0],
    {"intermediate_size_mlp", &ModelConfig::dense_hidden},
    {nullptr, &ModelConfig::dense_layers, [](const ModelConfig&) { return int64_t{0}; }},
    {nullptr, &ModelConfig::shared_hidden, [](const ModelConfig& c) { return c.ffn_hidden; }},
    {nullptr, &ModelConfig::normalized_experts, [](const ModelConfig&) { return int64_t{true}; }},
    {"interleave_moe_layer_step", &ModelConfig::mixed_every,
     [](const ModelConfig&) { return int64_t{1}; }},
    {"use_qk_norm", &ModelConfig::head_norms, [](const ModelConfig&) { return int64_t{true}; }}};
inline constexpr std::string_view kLlama4Classes[] = {"Llama4ForCausalLM",
                                                      "Llama4ForConditionalGeneration"};
inline constexpr FixedField kLlama4Fixed[] = {
    {"hidden_act", "\"silu\""}, {"num_experts_per_tok", "1"}, {"attention_bias", "false"}};

inline constexpr Architecture kLlama4 = {
    .name = "llama4",
    .layer = LlamaLayer,
    .tensors = kLlama4Tensors,
    .norms_after_rotation = true,
    .unit_head_norms = true,
    .unrotated_every = [](const ModelConfig&) { return int64_t{4}; },
    .chunked = true,
    .config_json = {.classes = kLlama4Classes,
                    .own = kLlama4Own,
                    .fixed = kLlama4Fixed,
                    .default_epsilon = 1e-5,
                    .default_rope_base = 500000,
                    .model_type = "llama4_text"},
    .gguf_pairs = true,
    .hugging_face_pairs = true,
    .experts = true,
    .dense_first = true,
    .dense_between = true,
    .gated_rows = true,
    .shared_expert = true,
    .hugging_face_experts = FusedExperts::kByHalvesTransposed};

}  // namespace treadle
