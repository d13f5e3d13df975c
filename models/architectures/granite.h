// Granite 3 and 4 (Granite Team 2024): Llama's layer with multipliers of the embedding, of what is
// added to the residual stream, of scores and of logits. Folders of Granite 4 keep the gate and
// what it gates in one matrix, which is read as two. Most layers of its hybrid models keep a state
// by Mamba 2's recurrence (Dao and Gu 2024); some of these have experts beside the one for all
// rows.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/experts.h"

namespace treadle {

inline constexpr std::string_view kGraniteClasses[] = {"GraniteForCausalLM"};

inline constexpr Architecture kGranite = {
    .name = "granite",
    .layer = LlamaLayer,
    .tensors = kLlamaTensors,
    .qkv_bias = Presence::kAsStored,
    .output_bias = Presence::kAsStored,
    .multipliers = true,
    .config_json = {.classes = kGraniteClasses, .fixed = kLlamaFixed},
    .gguf_pairs = true};

inline constexpr auto kGranite4Tensors = Changed(std::to_array(kLlamaTensors), [](TensorRow& row) {
  if (row.part == Part::kGate) row.hugging_face = "shared_mlp.gate_proj";
  if (row.part == Part::kUp) row.hugging_face = "shared_mlp.up_proj";
  if (row.part == Part::kDown) row.hugging_face = "shared_mlp.output_linear";
});
inline constexpr JsonField kGranite4Own[] = {
    {"shared_intermediate_size", &ModelConfig::ffn_hidden}};
inline constexpr std::string_view kGranite4Classes[] = {"GraniteMoeHybridForCausalLM"};
// Else layers have experts, or do not rotate.
inline constexpr FixedField kGranite4Fixed[] = {{"hidden_act", "\"silu\""},
                                                {"num_local_experts", "0", true},
                                                {"position_embedding_type", "\"rope\"", true}};

inline constexpr Architecture kGranite4 = {.name = "granite4",
                                           .layer = LlamaLayer,
                                           .tensors = kGranite4Tensors,
                                           .qkv_bias = Presence::kAsStored,
                                           .output_bias = Presence::kAsStored,
                                           .multipliers = true,
                                           .config_json = {.classes = kGranite4Classes,
                                                           .own = kGranite4Own,
                                                           .fixed = kGranite4Fixed,
                                                           .model_type = "granitemoehybrid"},
                                           .gguf_pairs = true,
                                           .hugging_face_gate_up = "shared_mlp.input_linear.weight",
                                           .gguf_name = "granite"};

inline constexpr std::array<TensorRow, 7> kMamba2Tensors = {
    {{Part::kStateInput, "ssm_in", "mamba.in_proj", Extent::kStateProducts, Extent::kHidden},
     {Part::kConvolution, "ssm_conv1d", "mamba.conv1d", Extent::kChannels, Extent::kTaps,
      [](const ModelConfig&) { return true; }},
     Bare(Part::kDecayRate, "ssm_a", "mamba.A_log", Extent::kStateHeads),
     Bare(Part::kDecayBias, "ssm_dt.bias", "mamba.dt_bias", Extent::kStateHeads),
     Bare(Part::kStateSkip, "ssm_d", "mamba.D", Extent::kStateHeads),
     {Part::kStateNorm, "ssm_norm", "mamba.norm", Extent::kStateValues},
     {Part::kStateOutput, "ssm_out", "mamba.out_proj", Extent::kHidden, Extent::kStateValues}}};
inline constexpr auto kGraniteHybridTensors = Joined(kGranite4Tensors, kMamba2Tensors);
inline constexpr JsonField kGraniteHybridOwn[] = {kGranite4Own[0],
                                                  {"mamba_n_groups", &ModelConfig::state_key_heads},
                                                  {"mamba_n_heads", &ModelConfig::state_heads},
                                                  {"mamba_d_state", &ModelConfig::state_key_dim},
                                                  {"mamba_d_head", &ModelConfig::state_value_dim},
                                                  {"mamba_d_conv", &ModelConfig::conv_taps}};
inline constexpr FixedField kGraniteHybridFixed[] = {kGranite4Fixed[0],
                                                     kGranite4Fixed[1],
                                                     {"mamba_conv_bias", "true"},
                                                     {"mamba_proj_bias", "false"}};

inline constexpr Architecture kGraniteHybrid = {
    .name = "granitehybrid",
    .layer = LlamaLayer,
    .tensors = kGraniteHybridTensors,
    .qkv_bias = Presence::kAsStored,
    .output_bias = Presence::kAsStored,
    .multipliers = true,
    .may_not_rotate = true,
    .states = StateKind::kMamba2,
    .config_json = {.classes = kGranite4Classes,
                    .own = kGraniteHybridOwn,
                    .fixed = kGraniteHybridFixed,
                    .model_type = "granitemoehybrid"},
    .gguf_pairs = true,
    .hugging_face_gate_up = "shared_mlp.input_linear.weight"};

inline constexpr auto kGraniteHybridMoeTensors = [] {
  constexpr auto kExperts =
      ExpertTensors("block_sparse_moe.router.layer", "block_sparse_moe.experts.*.gate_proj",
                    "block_sparse_moe.experts.*.up_proj", "block_sparse_moe.experts.*.down_proj");
  return Changed(Joined(kGraniteHybridTensors, kExperts), [](TensorRow& row) {
    const Part shared = row.part == Part::kGate ? Part::kSharedGate
                        : row.part == Part::kUp ? Part::kSharedUp
                                                : Part::kSharedDown;
    for (const TensorRow& of_shared : kSharedExpert) {
      const bool dense =
          row.part == Part::kGate || row.part == Part::kUp || row.part == Part::kDown;
      if (!dense || of_shared.part != shared) continue;
      const std::string_view name = row.hugging_face;
      row = of_shared;
      row.hugging_face = name;
    }
  });
}();
inline constexpr JsonField kGraniteHybridMoeOwn[] = {
    kGraniteHybridOwn[1], kGraniteHybridOwn[2],
    kGraniteHybridOwn[3], kGraniteHybridOwn[4],
    kGraniteHybridOwn[5], {"shared_intermediate_size", &ModelConfig::shared_hidden}};
inline constexpr FixedField kGraniteHybridMoeFixed[] = {
    kGraniteHybridFixed[0], kGraniteHybridFixed[2], kGraniteHybridFixed[3]};

inline constexpr Architecture kGraniteHybridMoe = [] {
  Architecture family = kGraniteHybrid;
  family.name = "granitehybridmoe";
  family.gguf_name = "granitehybrid";
  family.tensors = kGraniteHybridMoeTensors;
  family.config_json.own = kGraniteHybridMoeOwn;
  family.config_json.fixed = kGraniteHybridMoeFixed;
  family.experts = true;
  family.shared_expert = true;
  family.hugging_face_experts = FusedExperts::kByHalves;
  return family;
}();

}  // namespace treadle
