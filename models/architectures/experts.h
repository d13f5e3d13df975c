// Mixtures of experts: Mixtral (Jiang et al. 2024, section 2.1) and Qwen 3's (Yang et al. 2025,
// section 2). Llama's layer, but that each row goes through the feed-forward networks of a few
// experts, which a router chooses: hidden += sum of weight_e W_down_e (silu(W_gate_e n) * W_up_e
// n).
//
// Thread safety: constants.
#pragma once

#include <algorithm>
#include <array>

#include "models/architectures/llama.h"

namespace treadle {

// Llama's tensors without its feed-forward network, which is last.
inline constexpr size_t kLlamaOthers = std::size(kLlamaTensors) - 3;
consteval auto WithExperts(std::string_view router, std::string_view gate, std::string_view up,
                           std::string_view down) {
  std::array<TensorRow, kLlamaOthers + 4> rows = {};
  std::copy_n(kLlamaTensors, kLlamaOthers, rows.begin());
  rows[kLlamaOthers] = {Part::kRouter, "ffn_gate_inp", router, Extent::kExperts, Extent::kHidden};
  rows[kLlamaOthers + 1] = {Part::kExpertGate, "ffn_gate_exps.*", gate, Extent::kInner,
                            Extent::kHidden};
  rows[kLlamaOthers + 2] = {Part::kExpertUp, "ffn_up_exps.*", up, Extent::kInner, Extent::kHidden};
  rows[kLlamaOthers + 3] = {Part::kExpertDown, "ffn_down_exps.*", down, Extent::kHidden,
                            Extent::kInner};
  return rows;
}

inline constexpr auto kMixtralTensors =
    WithExperts("block_sparse_moe.gate", "block_sparse_moe.experts.*.w1",
                "block_sparse_moe.experts.*.w3", "block_sparse_moe.experts.*.w2");
inline constexpr std::string_view kMixtralClasses[] = {"MixtralForCausalLM"};
inline constexpr FixedField kMixtralFixed[] = {{"hidden_act", "\"silu\""}};

inline constexpr Architecture kMixtral = {.name = "mixtral",
                                          .layer = LlamaLayer,
                                          .tensors = kMixtralTensors,
                                          .config_json = {.classes = kMixtralClasses,
                                                          .fixed = kMixtralFixed,
                                                          .default_epsilon = 1e-5,
                                                          .default_rope_base = 1e6},
                                          .gguf_pairs = true,
                                          .experts = true,
                                          .gguf_name = "llama"};

inline constexpr auto kQwen3MoeTensors = WithExperts(
    "mlp.gate", "mlp.experts.*.gate_proj", "mlp.experts.*.up_proj", "mlp.experts.*.down_proj");
inline constexpr JsonField kQwen3MoeOwn[] = {
    {.name = "num_experts", .member = &ModelConfig::experts, .also = "num_local_experts"},
    {"moe_intermediate_size", &ModelConfig::ffn_hidden},
    {"norm_topk_prob", &ModelConfig::normalized_experts,
     [](const ModelConfig&) { return int64_t{false}; }}};
inline constexpr std::string_view kQwen3MoeClasses[] = {"Qwen3MoeForCausalLM"};
inline constexpr FixedField kQwen3MoeFixed[] = {{"hidden_act", "\"silu\""},
                                                {"attention_bias", "false"},
                                                {"decoder_sparse_step", "1"},
                                                {"mlp_only_layers", "[]"}};

inline constexpr Architecture kQwen3Moe = {.name = "qwen3moe",
                                           .layer = LlamaLayer,
                                           .tensors = kQwen3MoeTensors,
                                           .qk_norm = true,
                                           .config_json = {.classes = kQwen3MoeClasses,
                                                           .own = kQwen3MoeOwn,
                                                           .fixed = kQwen3MoeFixed,
                                                           .window_switch = "use_sliding_window",
                                                           .model_type = "qwen3_moe"},
                                           .experts = true};

}  // namespace treadle
