#include "models/architectures/gemma4.h"

#include "base/status.h"
#include "models/decoder.h"

namespace treadle {

absl::Status Gemma4Layer(const LayerPass& p, const LayerWeights& w) {
  // hidden += norm(W_o attention(rotate(norm(W_q n)), rotate(norm(W_k n)), norm(W_v n))), n =
  // norm(hidden); K and V may be an earlier layer's, and V the products that K is made of.
  const Tensor attention_in = p.Normalized(w.attention_norm, p.attention_in);
  if (!w.k.loaded()) {
    p.MatMul(attention_in, {w.q.To(p.q)});
  } else if (w.v.loaded()) {
    p.MatMul(attention_in, {w.q.To(p.q), w.k.To(p.k), w.v.To(p.v)});
  } else {
    p.MatMul(attention_in, {w.q.To(p.q), w.k.To(p.k)});
    p.backend.Copy(p.k, p.v);
  }
  p.NormalizeHeads(w.q_norm, p.q);
  if (w.k.loaded()) {
    p.NormalizeHeads(w.k_norm, p.k);
    p.NormalizeHeads(w.v_norm, p.v);
  }
  p.Attend();
  TREADLE_RETURN_IF_ERROR(p.AddProduct(w.out, p.attended, w.post_attention_norm));
  // hidden += norm(W_down (gelu(W_gate n) * W_up n)), n = norm(hidden).
  const Tensor ffn_in = p.Normalized(w.ffn_norm, p.ffn_in);
  p.MatMul(ffn_in, {w.gate.To(p.gate), w.up.To(p.up)});
  p.backend.GeGlu(p.gate, p.up, p.inner);
  TREADLE_RETURN_IF_ERROR(p.AddProduct(w.down, p.inner, w.post_ffn_norm));
  // hidden += norm(W (gelu(W_gate hidden) * the layer's own embedding)), the same on all ranks.
  if (w.input_gate.loaded()) {
    const Tensor gate = DenseTensor(p.gate.data, DType::kF32, p.hidden.rows, p.layer_input.cols);
    p.MatMul(p.hidden, {w.input_gate.To(gate)});
    p.backend.GeGlu(gate, p.layer_input, gate);
    p.MatMul(gate, {w.input_projection.To(p.half)});
    w.post_input_norm.Apply(p.backend, p.half, p.hidden, /*accumulate=*/true);
  }
  p.Normalize(w.layer_scale, p.hidden, p.hidden);
  return absl::OkStatus();
}

}  // namespace treadle
