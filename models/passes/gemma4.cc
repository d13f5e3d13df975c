#include "models/architectures/gemma4.h"

#include "base/status.h"
#include "models/decoder.h"

namespace treadle {
namespace {

// hidden += norm(norm(dense(norm(hidden))) + norm(experts(norm(hidden)))), each with its own norm.
absl::Status AddDenseAndExperts(const LayerPass& p, const LayerWeights& w) {
  p.Normalize(w.router_norm, p.hidden, p.half);
  p.Normalize(w.expert_norm, p.hidden, p.ffn_in);
  TREADLE_RETURN_IF_ERROR(p.RunExperts(w, p.half, p.ffn_in));
  p.Normalize(w.ffn_norm, p.hidden, p.ffn_in);
  p.GatedMatMul(p.ffn_in, w.shared_gate, w.shared_up, Backend::Gate::kGeGlu, p.gate);
  const Tensor sum = p.ffn_in;  // which has been read
  TREADLE_RETURN_IF_ERROR(
      p.sums.Sum(p.ranks, /*accumulate=*/false, p.half,
                 [&](Tensor rows, bool add) { p.MatMul(p.gate, {w.shared_down.To(rows, add)}); }));
  p.Normalize(w.post_dense_norm, p.half, sum);
  TREADLE_RETURN_IF_ERROR(
      p.sums.Sum(p.ranks, /*accumulate=*/false, p.half,
                 [&](Tensor rows, bool add) { p.experts.Mix(p.backend, add, rows); }));
  w.post_expert_norm.Apply(p.backend, p.half, sum, /*accumulate=*/true);
  w.post_ffn_norm.Apply(p.backend, sum, p.hidden, /*accumulate=*/true);
  return absl::OkStatus();
}

// hidden += norm(W_down (gelu(W_gate n) * W_up n)), n = norm(hidden).
absl::Status AddDense(const LayerPass& p, const LayerWeights& w) {
  const Tensor ffn_in = p.Normalized(w.ffn_norm, p.ffn_in);
  p.GatedMatMul(ffn_in, w.gate, w.up, Backend::Gate::kGeGlu, p.inner);
  return p.AddProduct(w.down, p.inner, w.post_ffn_norm);
}

}  // namespace

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
  TREADLE_RETURN_IF_ERROR(w.router.loaded() ? AddDenseAndExperts(p, w) : AddDense(p, w));
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
