// Nemotron-H and Nemotron Nano 2 (NVIDIA 2025), and Nemotron 3 Nano, which has experts in place of
// the networks: every layer is one block, a state kept by Mamba 2's recurrence (Dao and Gu 2024),
// attention, or a feed-forward network with a squared ReLU. Nothing rotates.
//
// Thread safety: constants and a pure function.
#pragma once

#include "models/architectures/granite.h"

namespace treadle {

absl::Status NemotronLayer(const LayerPass& pass, const LayerWeights& weights);

inline constexpr bool (*kInFfn)(const ModelConfig&, int64_t) = [](const ModelConfig& c, int64_t i) {
  return c.IsFfn(i);
};
inline constexpr bool (*kInOthers)(const ModelConfig&, int64_t) =
    [](const ModelConfig& c, int64_t i) { return !c.IsFfn(i); };

inline constexpr std::array<TensorRow, 8> kNemotronAttention = {
    {{Part::kEmbedding, "token_embd", "backbone.embeddings", Extent::kVocab, Extent::kHidden},
     {Part::kOutputNorm, "output_norm", "backbone.norm_f", Extent::kHidden},
     {Part::kHead, "output", "lm_head", Extent::kVocab, Extent::kHidden},
     {Part::kAttentionNorm, "attn_norm", "norm", Extent::kHidden},
     {Part::kQ, "attn_q", "mixer.q_proj", Extent::kQueries, Extent::kHidden},
     {Part::kK, "attn_k", "mixer.k_proj", Extent::kKeys, Extent::kHidden},
     {Part::kV, "attn_v", "mixer.v_proj", Extent::kKeys, Extent::kHidden},
     {Part::kAttentionOutput, "attn_output", "mixer.o_proj", Extent::kHidden, Extent::kQueries}}};
inline constexpr std::array<TensorRow, 2> kNemotronFfn = {
    {{Part::kUp, "ffn_up", "mixer.up_proj", Extent::kInner, Extent::kHidden},
     {Part::kDown, "ffn_down", "mixer.down_proj", Extent::kHidden, Extent::kInner}}};
inline constexpr std::array<TensorRow, 6> kNemotronExperts = {
    {{Part::kRouter, "ffn_gate_inp", "mixer.gate", Extent::kExperts, Extent::kHidden},
     Bare(Part::kRouterBias, "exp_probs_b.bias", "mixer.gate.e_score_correction_bias",
          Extent::kExperts),
     {Part::kExpertUp, "ffn_up_exps.*", "mixer.experts.*.up_proj", Extent::kInner, Extent::kHidden},
     {Part::kExpertDown, "ffn_down_exps.*", "mixer.experts.*.down_proj", Extent::kHidden,
      Extent::kInner},
     {Part::kSharedUp, "ffn_up_shexp", "mixer.shared_experts.up_proj", Extent::kSharedInner,
      Extent::kHidden},
     {Part::kSharedDown, "ffn_down_shexp", "mixer.shared_experts.down_proj", Extent::kHidden,
      Extent::kSharedInner}}};
// Granite's states under the module's name.
inline constexpr std::string_view kNemotronStates[] = {
    "mixer.in_proj", "mixer.conv1d", "mixer.A_log",   "mixer.dt_bias",
    "mixer.D",       "mixer.norm",   "mixer.out_proj"};
template <size_t kRows>
constexpr auto NemotronTensors(const std::array<TensorRow, kRows>& network) {
  auto rows = Joined(Joined(kNemotronAttention, kMamba2Tensors), network);
  size_t state = 0;
  for (TensorRow& row : rows) {
    if (InState(row.part)) row.hugging_face = kNemotronStates[state++];
    if (InAttention(row.part) || InState(row.part)) row.in_layer = kInOthers;
    if (row.part > Part::kFfnNorm) row.in_layer = kInFfn;
  }
  return rows;
}
inline constexpr auto kNemotronTensors = NemotronTensors(kNemotronFfn);
inline constexpr auto kNemotronMoeTensors = NemotronTensors(kNemotronExperts);

inline constexpr JsonField kNemotronOwn[] = {
    {"n_groups", &ModelConfig::state_key_heads},
    {"mamba_num_heads", &ModelConfig::state_heads},
    {"ssm_state_size", &ModelConfig::state_key_dim},
    {"mamba_head_dim", &ModelConfig::state_value_dim},
    {"conv_kernel", &ModelConfig::conv_taps},
    {.name = "head_dim", .member = &ModelConfig::head_dim, .also = "attention_head_dim"}};
inline constexpr std::string_view kNemotronClasses[] = {"NemotronHForCausalLM"};
inline constexpr FixedField kNemotronFixed[] = {{"mlp_hidden_act", "\"relu2\""},
                                                {"mamba_hidden_act", "\"silu\""},
                                                {"use_conv_bias", "true"},
                                                {"mamba_proj_bias", "false"},
                                                {"use_bias", "false"},
                                                {"attention_bias", "false"},
                                                {"mlp_bias", "false"}};

inline constexpr Architecture kNemotronH = {.name = "nemotron_h",
                                            .layer = NemotronLayer,
                                            .tensors = kNemotronTensors,
                                            .rotary = false,
                                            .states = StateKind::kMamba2,
                                            .one_block = true,
                                            .config_json = {.classes = kNemotronClasses,
                                                            .own = kNemotronOwn,
                                                            .fixed = kNemotronFixed,
                                                            .epsilon = "layer_norm_epsilon",
                                                            .default_epsilon = 1e-5},
                                            .hugging_face_layers = "backbone.layers.",
                                            .gguf_layer_epsilon = true};

inline constexpr JsonField kNemotronMoeOwn[] = {
    kNemotronOwn[0],
    kNemotronOwn[1],
    kNemotronOwn[2],
    kNemotronOwn[3],
    kNemotronOwn[4],
    kNemotronOwn[5],
    {"n_routed_experts", &ModelConfig::experts},
    {"moe_intermediate_size", &ModelConfig::ffn_hidden},
    {"moe_shared_expert_intermediate_size", &ModelConfig::shared_hidden},
    {"norm_topk_prob", &ModelConfig::normalized_experts}};
// Experts of Nemotron 3 Super read a latent.
inline constexpr FixedField kNemotronMoeFixed[] = {
    kNemotronFixed[0],         kNemotronFixed[1], kNemotronFixed[2],  kNemotronFixed[3],
    kNemotronFixed[4],         kNemotronFixed[5], kNemotronFixed[6],  {"moe_latent_size", "null"},
    {"n_shared_experts", "1"}, {"n_group", "1"},  {"topk_group", "1"}};

inline constexpr Architecture kNemotronHMoe = [] {
  Architecture family = kNemotronH;
  family.name = "nemotron_h_moe";
  family.tensors = kNemotronMoeTensors;
  family.config_json.own = kNemotronMoeOwn;
  family.config_json.fixed = kNemotronMoeFixed;
  family.config_json.model_type = "nemotron_h";
  family.experts = true;
  family.shared_expert = true;
  family.sigmoid_router = true;
  return family;
}();

}  // namespace treadle
