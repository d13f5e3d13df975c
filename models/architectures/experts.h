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

template <size_t kFirst, size_t kSecond>
constexpr auto Joined(const std::array<TensorRow, kFirst>& first,
                      const std::array<TensorRow, kSecond>& second) {
  std::array<TensorRow, kFirst + kSecond> rows = {};
  std::copy(second.begin(), second.end(), std::copy(first.begin(), first.end(), rows.begin()));
  return rows;
}
// A dense family's tensors without its feed-forward network, which is last.
template <size_t kRows>
constexpr auto WithoutFfn(const TensorRow (&dense)[kRows]) {
  std::array<TensorRow, kRows - 3> rows = {};
  std::copy_n(dense, rows.size(), rows.begin());
  return rows;
}
// Says in which layers a tensor is where the first ones have no experts.
constexpr void InMixedLayers(TensorRow& row) {
  if (row.part == Part::kGate || row.part == Part::kUp || row.part == Part::kDown) {
    row.in_layer = [](const ModelConfig& c, int64_t layer) { return !c.Mixes(layer); };
  } else if (row.part >= Part::kRouter && row.part <= Part::kSharedDown) {
    row.in_layer = [](const ModelConfig& c, int64_t layer) { return c.Mixes(layer); };
  }
}
constexpr auto ExpertTensors(std::string_view router, std::string_view gate, std::string_view up,
                             std::string_view down) {
  return std::array<TensorRow, 4>{
      {{Part::kRouter, "ffn_gate_inp", router, Extent::kExperts, Extent::kHidden},
       {Part::kExpertGate, "ffn_gate_exps.*", gate, Extent::kInner, Extent::kHidden},
       {Part::kExpertUp, "ffn_up_exps.*", up, Extent::kInner, Extent::kHidden},
       {Part::kExpertDown, "ffn_down_exps.*", down, Extent::kHidden, Extent::kInner}}};
}
inline constexpr auto kQwenExperts = ExpertTensors(
    "mlp.gate", "mlp.experts.*.gate_proj", "mlp.experts.*.up_proj", "mlp.experts.*.down_proj");

// An expert for all rows, and the factor of what it makes (Yang et al. 2024, Qwen2, section 2.2.2).
inline constexpr std::array<TensorRow, 4> kSharedExpert = {
    {{Part::kSharedRouter, "ffn_gate_inp_shexp", "mlp.shared_expert_gate", Extent::kOne,
      Extent::kHidden},
     {Part::kSharedGate, "ffn_gate_shexp", "mlp.shared_expert.gate_proj", Extent::kSharedInner,
      Extent::kHidden},
     {Part::kSharedUp, "ffn_up_shexp", "mlp.shared_expert.up_proj", Extent::kSharedInner,
      Extent::kHidden},
     {Part::kSharedDown, "ffn_down_shexp", "mlp.shared_expert.down_proj", Extent::kHidden,
      Extent::kSharedInner}}};

inline constexpr auto kMixtralTensors =
    Joined(WithoutFfn(kLlamaTensors),
           ExpertTensors("block_sparse_moe.gate", "block_sparse_moe.experts.*.w1",
                         "block_sparse_moe.experts.*.w3", "block_sparse_moe.experts.*.w2"));
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

inline constexpr auto kQwen3MoeTensors = Joined(WithoutFfn(kLlamaTensors), kQwenExperts);
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

// Qwen 1.5's and 2's (Yang et al. 2024, section 2.2.2): with an expert for all rows.
inline constexpr auto kQwen2MoeTensors = Joined(kQwen3MoeTensors, kSharedExpert);
inline constexpr std::string_view kQwen2MoeClasses[] = {"Qwen2MoeForCausalLM"};
inline constexpr FixedField kQwen2MoeFixed[] = {{"hidden_act", "\"silu\""},
                                                {"qkv_bias", "true"},
                                                {"decoder_sparse_step", "1"},
                                                {"mlp_only_layers", "[]"}};

inline constexpr Architecture kQwen2Moe = {.name = "qwen2moe",
                                           .layer = LlamaLayer,
                                           .tensors = kQwen2MoeTensors,
                                           .qkv_bias = Presence::kAlways,
                                           .config_json = {.classes = kQwen2MoeClasses,
                                                           .own = kQwen3MoeOwn,
                                                           .fixed = kQwen2MoeFixed,
                                                           .window_switch = "use_sliding_window",
                                                           .model_type = "qwen2_moe"},
                                           .experts = true,
                                           .shared_expert = true,
                                           .unnormalized_experts = true};

// The bias that routers of sigmoids choose with (Routing::bias).
inline constexpr TensorRow kRouterBias[] = {Bare(
    Part::kRouterBias, "exp_probs_b.bias", "mlp.gate.e_score_correction_bias", Extent::kExperts)};

// MiniMax-M2 (MiniMax 2025): such routers, a norm of all queries and one of all keys as OLMo's, and
// a share of each head that rotates.
inline constexpr auto kMiniMaxM2Tensors =
    Changed(Joined(kMixtralTensors, std::to_array(kRouterBias)), [](TensorRow& row) {
      if (row.part == Part::kQNorm) row.rows = Extent::kAllQueries;
      if (row.part == Part::kKNorm) row.rows = Extent::kAllKeys;
      if (row.part == Part::kQ) row.rows = Extent::kAllQueries, row.bias = nullptr;
      if (row.part == Part::kK) row.rows = Extent::kAllKeys, row.bias = nullptr;
      if (row.part == Part::kV || row.part == Part::kAttentionOutput) row.bias = nullptr;
      if (row.part == Part::kRouterBias) {
        row.hugging_face = "block_sparse_moe.e_score_correction_bias";
      }
    });
inline constexpr std::string_view kMiniMaxM2Classes[] = {"MiniMaxM2ForCausalLM"};
inline constexpr FixedField kMiniMaxM2Fixed[] = {
    {"hidden_act", "\"silu\""},        {"scoring_func", "\"sigmoid\""},
    {"use_routing_bias", "true"},      {"use_qk_norm", "true"},
    {"qk_norm_type", "\"per_layer\""}, {"shared_intermediate_size", "0"}};

inline constexpr Architecture kMiniMaxM2 = {
    .name = "minimax-m2",
    .layer = LlamaLayer,
    .tensors = kMiniMaxM2Tensors,
    .qk_norm = true,
    .config_json = {.classes = kMiniMaxM2Classes,
                    .fixed = kMiniMaxM2Fixed,
                    .default_rope_base = 5e6,
                    .model_type = "minimax_m2",
                    .rotary_share = "partial_rotary_factor"},
    .experts = true,
    .sigmoid_router = true};

}  // namespace treadle
