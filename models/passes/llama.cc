#include "models/architectures/llama.h"

#include "base/status.h"
#include "models/decoder.h"

namespace treadle {

namespace {

absl::Status FeedForward(const LayerPass& p, const LayerWeights& w) {
  // hidden += norm(W_down (silu(W_gate n) * W_up n)), n = norm(hidden); Gemma: gelu.
  const Tensor ffn_in = p.Normalized(w.ffn_norm, p.ffn_in);
  if (w.router.loaded()) return p.AddExperts(w);
  if (p.architecture.xielu) {
    p.MatMul(ffn_in, {w.up.To(p.up)});
    p.backend.Xielu(p.up, w.xielu, p.inner);
    return p.AddProduct(w.down, p.inner, w.post_ffn_norm);
  }
  const auto by = p.architecture.geglu ? Backend::Gate::kGeGlu : Backend::Gate::kSwiGlu;
  if (w.gate_up.loaded()) {
    p.MatMul(ffn_in, {w.gate_up.To(p.gate_up)});
    p.backend.Apply(by, p.gate, p.up, p.inner);
  } else {
    p.GatedMatMul(ffn_in, w.gate, w.up, by, p.inner);
  }
  return p.AddProduct(w.down, p.inner, w.post_ffn_norm);
}

}  // namespace

absl::Status LlamaLayer(const LayerPass& p, const LayerWeights& w) {
  // hidden += norm(W_o attention(rotate(norm(W_q n)), rotate(norm(W_k n)), W_v n)), n =
  // norm(hidden): with the norms that the family has.
  const Tensor attention_in = p.Normalized(w.attention_norm, p.attention_in);
  if (w.state_input.loaded()) {
    TREADLE_RETURN_IF_ERROR(p.AddState(w, attention_in));
    return FeedForward(p, w);
  }
  if (!w.key_up.empty()) {
    TREADLE_RETURN_IF_ERROR(p.AddLatent(w, attention_in));
    return FeedForward(p, w);
  }
  if (w.qkv.loaded()) {
    p.MatMul(attention_in, {w.qkv.To(p.qkv)});
  } else if (w.q_gate.loaded()) {
    p.MatMul(attention_in, {w.q.To(p.q), w.q_gate.To(p.q_gate), w.k.To(p.k), w.v.To(p.v)});
  } else {
    p.MatMul(attention_in, {w.q.To(p.q), w.k.To(p.k), w.v.To(p.v)});
  }
  if (p.architecture.norms_after_rotation && p.rotary != nullptr) p.Rotate();
  if (w.q_norm.loaded()) {
    p.NormalizeHeads(w.q_norm, p.q);
    p.NormalizeHeads(w.k_norm, p.k);
  }
  p.Attend();
  if (w.q_gate.loaded()) p.backend.SigmoidGate(p.q_gate, p.attended, p.attended);
  TREADLE_RETURN_IF_ERROR(p.AddProduct(w.out, p.attended, w.post_attention_norm));
  return FeedForward(p, w);
}

}  // namespace treadle
