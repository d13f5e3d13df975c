// Granite 3 and the dense models of Granite 4 (Granite Team 2024): Llama's layer with multipliers
// of the embedding, of what is added to the residual stream, of scores and of logits. Folders of
// Granite 4 keep the gate and what it gates in one matrix, which is read as two.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

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

}  // namespace treadle
