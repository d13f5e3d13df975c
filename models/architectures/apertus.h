// Apertus (Swiss AI Initiative 2025): Llama's layer with a norm on each head's queries and keys,
// and a feed-forward network without a gate, whose xIELU has numbers of its own in every layer.
// Folders keep these as tensors, .gguf files as lists in their metadata.
//
// Thread safety: constants.
#pragma once

#include "models/architectures/llama.h"

namespace treadle {

inline constexpr auto kApertusTensors = [] {
  constexpr TensorRow kOwn[] = {
      {Part::kXieluPositive, "ffn_act.alpha_p", "mlp.act_fn.alpha_p", Extent::kOne},
      {Part::kXieluNegative, "ffn_act.alpha_n", "mlp.act_fn.alpha_n", Extent::kOne},
      {Part::kXieluSlope, "ffn_act.beta", "mlp.act_fn.beta", Extent::kOne},
      {Part::kXieluLargest, "ffn_act.eps", "mlp.act_fn.eps", Extent::kOne}};
  std::array<TensorRow, std::size(kLlamaTensors) + std::size(kOwn) - 1> rows = {};
  auto* to = rows.begin();
  for (TensorRow row : kLlamaTensors) {
    if (row.part == Part::kGate) continue;
    if (row.part == Part::kAttentionNorm) row.hugging_face = "attention_layernorm";
    if (row.part == Part::kFfnNorm) row.hugging_face = "feedforward_layernorm";
    *to++ = row;
  }
  std::ranges::copy(kOwn, to);
  return rows;
}();
inline constexpr std::string_view kApertusClasses[] = {"ApertusForCausalLM"};
inline constexpr FixedField kApertusFixed[] = {{"hidden_act", "\"xielu\""}, {"mlp_bias", "false"}};

inline constexpr Architecture kApertus = {.name = "apertus",
                                          .layer = LlamaLayer,
                                          .tensors = kApertusTensors,
                                          .qkv_bias = Presence::kAsStored,
                                          .output_bias = Presence::kAsStored,
                                          .qk_norm = true,
                                          .xielu = true,
                                          .config_json = {.classes = kApertusClasses,
                                                          .fixed = kApertusFixed,
                                                          .default_epsilon = 1e-5,
                                                          .default_rope_base = 12e6}};

}  // namespace treadle
