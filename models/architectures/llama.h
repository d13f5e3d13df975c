// Llama (Touvron et al. 2023; grouped queries as in Llama 2 and 3), Mistral, which differs by a
// sliding window alone, and Ministral 3 (Mistral AI 2025, the models of text): with YaRN, and
// queries that grow with the logarithm of how often the context of training fits before them.
//
// Thread safety: constants and a pure function.
#pragma once

#include <array>

#include "models/architectures/architecture.h"

namespace treadle {

absl::Status LlamaLayer(const LayerPass& pass, const LayerWeights& weights);

// Also the names of those that came after it.
inline constexpr bool (*kQkvBias)(const ModelConfig&) = [](const ModelConfig& c) {
  return c.qkv_bias;
};
inline constexpr TensorRow kLlamaTensors[] = {
    {Part::kEmbedding, "token_embd", "model.embed_tokens", Extent::kVocab, Extent::kHidden},
    {Part::kOutputNorm, "output_norm", "model.norm", Extent::kHidden},
    {Part::kHead, "output", "lm_head", Extent::kVocab, Extent::kHidden},
    {Part::kAttentionNorm, "attn_norm", "input_layernorm", Extent::kHidden},
    {Part::kQ, "attn_q", "self_attn.q_proj", Extent::kQueries, Extent::kHidden, kQkvBias},
    {Part::kK, "attn_k", "self_attn.k_proj", Extent::kKeys, Extent::kHidden, kQkvBias},
    {Part::kV, "attn_v", "self_attn.v_proj", Extent::kKeys, Extent::kHidden, kQkvBias},
    {Part::kQNorm, "attn_q_norm", "self_attn.q_norm", Extent::kHeadDim},
    {Part::kKNorm, "attn_k_norm", "self_attn.k_norm", Extent::kHeadDim},
    {Part::kAttentionOutput, "attn_output", "self_attn.o_proj", Extent::kHidden, Extent::kQueries,
     [](const ModelConfig& c) { return c.output_bias; }},
    {Part::kFfnNorm, "ffn_norm", "post_attention_layernorm", Extent::kHidden},
    {Part::kGate, "ffn_gate", "mlp.gate_proj", Extent::kInner, Extent::kHidden},
    {Part::kUp, "ffn_up", "mlp.up_proj", Extent::kInner, Extent::kHidden},
    {Part::kDown, "ffn_down", "mlp.down_proj", Extent::kHidden, Extent::kInner}};

// A row whose names are whole.
constexpr TensorRow Bare(Part part, std::string_view gguf, std::string_view hugging_face,
                         Extent rows) {
  return {.part = part, .gguf = gguf, .hugging_face = hugging_face, .rows = rows, .bare = true};
}

// The rows as `change` leaves each of them: for families that call some parts otherwise.
template <size_t kRows, typename Change>
constexpr auto Changed(std::array<TensorRow, kRows> rows, Change change) {
  for (TensorRow& row : rows) change(row);
  return rows;
}

inline constexpr std::string_view kLlamaClasses[] = {"LlamaForCausalLM", "MistralForCausalLM"};
inline constexpr FixedField kLlamaFixed[] = {{"mlp_bias", "false"}, {"hidden_act", "\"silu\""}};

inline constexpr Architecture kLlama = {
    .name = "llama",
    .layer = LlamaLayer,
    .tensors = kLlamaTensors,
    .qkv_bias = Presence::kAsStored,
    .output_bias = Presence::kAsStored,
    .config_json = {.classes = kLlamaClasses, .fixed = kLlamaFixed, .window_model_type = "mistral"},
    .gguf_pairs = true};

inline constexpr std::string_view kMinistral3Classes[] = {"Ministral3ForCausalLM"};
inline constexpr FixedField kMinistral3Fixed[] = {{"hidden_act", "\"silu\""}};

inline constexpr Architecture kMinistral3 = {.name = "mistral3",
                                             .layer = LlamaLayer,
                                             .tensors = kLlamaTensors,
                                             .config_json = {.classes = kMinistral3Classes,
                                                             .fixed = kMinistral3Fixed,
                                                             .default_epsilon = 1e-5,
                                                             .default_rope_base = 1e6,
                                                             .model_type = "ministral3"},
                                             .gguf_pairs = true};

}  // namespace treadle
