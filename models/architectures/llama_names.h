// What Llama's tensors are called in either container, and how GGUF orders the rows of some.
//
// Thread safety: constants and pure functions.
#pragma once

#include <cstdint>
#include <vector>

namespace treadle {

// Names without ".weight" and ".bias"; a layer's are LAYERS + index + "." + name.
struct LlamaNames {
  const char *embedding, *layers, *attention_norm, *q, *k, *v, *out, *ffn_norm, *gate, *up, *down,
      *norm, *head;
};
inline constexpr LlamaNames kLlamaGgufNames = {
    "token_embd", "blk.",     "attn_norm", "attn_q",   "attn_k",      "attn_v", "attn_output",
    "ffn_norm",   "ffn_gate", "ffn_up",    "ffn_down", "output_norm", "output"};
inline constexpr LlamaNames kLlamaHuggingFaceNames = {"model.embed_tokens",
                                                      "model.layers.",
                                                      "input_layernorm",
                                                      "self_attn.q_proj",
                                                      "self_attn.k_proj",
                                                      "self_attn.v_proj",
                                                      "self_attn.o_proj",
                                                      "post_attention_layernorm",
                                                      "mlp.gate_proj",
                                                      "mlp.up_proj",
                                                      "mlp.down_proj",
                                                      "model.norm",
                                                      "lm_head"};

// GGUF's rows of Q and K are ordered for rotation of adjacent pairs: (2i, 2i + 1) of each head.
// Inside, and in Hugging Face files, pairs are (i, i + rope_dim / 2). Row i there is row [i] here.
std::vector<int32_t> HalfSplitOrder(int64_t heads, int64_t head_dim, int64_t rope_dim);

}  // namespace treadle
