// Qwen 3.5 and 3.6 (their text), and Qwen3-Next: three of four layers keep a state by the gated
// delta rule (Backend::GatedDelta) and read it through a norm and a gate; every fourth attends,
// with a gate on what each head sees. Norms' gains count from 1 in folders.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/experts.h"

namespace treadle {

inline constexpr TensorRow kQwen35Tensors[] = {
    {Part::kEmbedding, "token_embd", "model.embed_tokens", Extent::kVocab, Extent::kHidden},
    {Part::kOutputNorm, "output_norm", "model.norm", Extent::kHidden},
    {Part::kHead, "output", "lm_head", Extent::kVocab, Extent::kHidden},
    {Part::kAttentionNorm, "attn_norm", "input_layernorm", Extent::kHidden},
    {Part::kQ, "attn_q", "self_attn.q_proj", Extent::kGatedQueries, Extent::kHidden},
    {Part::kK, "attn_k", "self_attn.k_proj", Extent::kKeys, Extent::kHidden},
    {Part::kV, "attn_v", "self_attn.v_proj", Extent::kKeys, Extent::kHidden},
    {Part::kQNorm, "attn_q_norm", "self_attn.q_norm", Extent::kHeadDim},
    {Part::kKNorm, "attn_k_norm", "self_attn.k_norm", Extent::kHeadDim},
    {Part::kAttentionOutput, "attn_output", "self_attn.o_proj", Extent::kHidden, Extent::kQueries},
    {Part::kStateInput, "attn_qkv", "linear_attn.in_proj_qkv", Extent::kChannels, Extent::kHidden},
    {Part::kStateGate, "attn_gate", "linear_attn.in_proj_z", Extent::kStateValues, Extent::kHidden},
    {Part::kStateBeta, "ssm_beta", "linear_attn.in_proj_b", Extent::kStateHeads, Extent::kHidden},
    {Part::kStateDecay, "ssm_alpha", "linear_attn.in_proj_a", Extent::kStateHeads, Extent::kHidden},
    {Part::kConvolution, "ssm_conv1d", "linear_attn.conv1d", Extent::kChannels, Extent::kTaps},
    Bare(Part::kDecayRate, "ssm_a", "linear_attn.A_log", Extent::kStateHeads),
    Bare(Part::kDecayBias, "ssm_dt.bias", "linear_attn.dt_bias", Extent::kStateHeads),
    {Part::kStateNorm, "ssm_norm", "linear_attn.norm", Extent::kStateValueDim},
    {Part::kStateOutput, "ssm_out", "linear_attn.out_proj", Extent::kHidden, Extent::kStateValues},
    {Part::kFfnNorm, "post_attention_norm", "post_attention_layernorm", Extent::kHidden},
    {Part::kGate, "ffn_gate", "mlp.gate_proj", Extent::kInner, Extent::kHidden},
    {Part::kUp, "ffn_up", "mlp.up_proj", Extent::kInner, Extent::kHidden},
    {Part::kDown, "ffn_down", "mlp.down_proj", Extent::kHidden, Extent::kInner}};

inline constexpr std::string_view kQwen35Classes[] = {"Qwen3_5ForCausalLM",
                                                      "Qwen3_5ForConditionalGeneration"};
inline constexpr FixedField kQwen35Fixed[] = {{"hidden_act", "\"silu\""},
                                              {"attention_bias", "false"}};

inline constexpr Architecture kQwen35 = {.name = "qwen35",
                                         .layer = LlamaLayer,
                                         .tensors = kQwen35Tensors,
                                         .qk_norm = true,
                                         .states = StateKind::kDeltaRule,
                                         .gated_attention = true,
                                         .config_json = {.classes = kQwen35Classes,
                                                         .fixed = kQwen35Fixed,
                                                         .model_type = "qwen3_5_text",
                                                         .rotary_share = "partial_rotary_factor",
                                                         .default_rotary_share = 0.25},
                                         .hugging_face_gain = 1,
                                         .gguf_tiled_states = true};

// Their mixtures of experts.
inline constexpr auto kQwen35MoeTensors =
    Joined(Joined(WithoutFfn(kQwen35Tensors), kQwenExperts), kSharedExpert);
inline constexpr JsonField kQwen35MoeOwn[] = {
    {.name = "num_experts", .member = &ModelConfig::experts, .also = "num_local_experts"},
    {"moe_intermediate_size", &ModelConfig::ffn_hidden}};
inline constexpr std::string_view kQwen35MoeClasses[] = {"Qwen3_5MoeForCausalLM",
                                                         "Qwen3_5MoeForConditionalGeneration"};

inline constexpr Architecture kQwen35Moe = {.name = "qwen35moe",
                                            .layer = LlamaLayer,
                                            .tensors = kQwen35MoeTensors,
                                            .qk_norm = true,
                                            .states = StateKind::kDeltaRule,
                                            .gated_attention = true,
                                            .config_json = {.classes = kQwen35MoeClasses,
                                                            .own = kQwen35MoeOwn,
                                                            .fixed = kQwen35Fixed,
                                                            .model_type = "qwen3_5_moe_text",
                                                            .rotary_share = "partial_rotary_factor",
                                                            .default_rotary_share = 0.25},
                                            .hugging_face_gain = 1,
                                            .experts = true,
                                            .shared_expert = true,
                                            .hugging_face_experts = FusedExperts::kByHalves,
                                            .gguf_tiled_states = true};

// Qwen3-Next: what makes betas and decays is one matrix.
inline constexpr auto kQwen3NextTensors = [] {
  std::array<TensorRow, std::size(kQwen35MoeTensors) - 1> rows = {};
  std::ranges::copy_if(kQwen35MoeTensors, rows.begin(),
                       [](const TensorRow& row) { return row.part != Part::kStateDecay; });
  for (TensorRow& row : rows) {
    if (row.part != Part::kStateBeta) continue;
    row = {Part::kStateBeta, "ssm_ba", "linear_attn.in_proj_ba", Extent::kBetaDecay,
           Extent::kHidden};
  }
  return rows;
}();
inline constexpr JsonField kQwen3NextOwn[] = {
    kQwen35MoeOwn[0], kQwen35MoeOwn[1], {"norm_topk_prob", &ModelConfig::normalized_experts}};
inline constexpr std::string_view kQwen3NextClasses[] = {"Qwen3NextForCausalLM"};

inline constexpr Architecture kQwen3Next = {.name = "qwen3next",
                                            .layer = LlamaLayer,
                                            .tensors = kQwen3NextTensors,
                                            .qk_norm = true,
                                            .states = StateKind::kDeltaRule,
                                            .gated_attention = true,
                                            .config_json = {.classes = kQwen3NextClasses,
                                                            .own = kQwen3NextOwn,
                                                            .fixed = kQwen3MoeFixed,
                                                            .model_type = "qwen3_next",
                                                            .rotary_share = "partial_rotary_factor",
                                                            .default_rotary_share = 0.25},
                                            .hugging_face_gain = 1,
                                            .experts = true,
                                            .shared_expert = true,
                                            .hugging_face_fused_states = true};

}  // namespace treadle
