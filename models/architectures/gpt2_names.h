// What GPT-2's tensors are called in either container.
//
// Thread safety: constants.
#pragma once

namespace treadle {

// Names without ".weight" and ".bias"; a layer's are LAYERS + index + "." + name.
struct Gpt2Names {
  const char *embedding, *positions, *layers, *attention_norm, *qkv, *out, *ffn_norm, *up, *down,
      *norm, *head;
};
inline constexpr Gpt2Names kGpt2GgufNames = {"token_embd", "position_embd", "blk.",     "attn_norm",
                                             "attn_qkv",   "attn_output",   "ffn_norm", "ffn_up",
                                             "ffn_down",   "output_norm",   "output"};
// Files saved from the whole model have "transformer." before all but the head.
inline constexpr Gpt2Names kGpt2HuggingFaceNames = {
    "wte",  "wpe",      "h.",         "ln_1", "attn.c_attn", "attn.c_proj",
    "ln_2", "mlp.c_fc", "mlp.c_proj", "ln_f", "lm_head"};

}  // namespace treadle
