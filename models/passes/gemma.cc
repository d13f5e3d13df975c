#include "models/architectures/gemma.h"

#include "base/status.h"
#include "models/decoder.h"

namespace treadle {

absl::Status GemmaLayer(const LayerPass& p, const LayerWeights& w) {
  // hidden += norm(W_o attention(rotate(norm(W_q n)), rotate(norm(W_k n)), W_v n)), n =
  // norm(hidden).
  p.Normalize(w.attention_norm, p.hidden, p.attention_in);
  p.MatMul(p.attention_in, {w.q.To(p.q), w.k.To(p.k), w.v.To(p.v)});
  p.NormalizeHeads(w.q_norm, p.q);
  p.NormalizeHeads(w.k_norm, p.k);
  p.Attend();
  TREADLE_RETURN_IF_ERROR(p.AddNormalized(w.post_attention_norm, w.out, p.attended));
  // hidden += norm(W_down (gelu(W_gate n) * W_up n)), n = norm(hidden).
  p.Normalize(w.ffn_norm, p.hidden, p.ffn_in);
  p.MatMul(p.ffn_in, {w.gate.To(p.gate), w.up.To(p.up)});
  p.backend.GeGlu(p.gate, p.up, p.inner);
  return p.AddNormalized(w.post_ffn_norm, w.down, p.inner);
}

}  // namespace treadle
