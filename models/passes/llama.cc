#include "models/architectures/llama.h"

#include "base/status.h"
#include "models/decoder.h"

namespace treadle {

absl::Status LlamaLayer(const LayerPass& p, const LayerWeights& w) {
  // hidden += W_o attention(rotate(W_q n), rotate(W_k n), W_v n), n = norm(hidden).
  p.Normalize(w.attention_norm, p.hidden, p.attention_in);
  if (w.qkv.loaded()) {
    p.MatMul(p.attention_in, {w.qkv.To(p.qkv)});
  } else {
    p.MatMul(p.attention_in, {w.q.To(p.q), w.k.To(p.k), w.v.To(p.v)});
  }
  if (w.q_norm.loaded()) {
    p.NormalizeHeads(w.q_norm, p.q);
    p.NormalizeHeads(w.k_norm, p.k);
  }
  p.Attend();
  TREADLE_RETURN_IF_ERROR(p.AddProduct(w.out, p.attended));
  // hidden += W_down (silu(W_gate n) * W_up n), n = norm(hidden).
  p.Normalize(w.ffn_norm, p.hidden, p.ffn_in);
  if (w.router.loaded()) return p.AddExperts(w);
  if (w.gate_up.loaded()) {
    p.MatMul(p.ffn_in, {w.gate_up.To(p.gate_up)});
  } else {
    p.MatMul(p.ffn_in, {w.gate.To(p.gate), w.up.To(p.up)});
  }
  p.backend.SwiGlu(p.gate, p.up, p.inner);
  return p.AddProduct(w.down, p.inner);
}

}  // namespace treadle
