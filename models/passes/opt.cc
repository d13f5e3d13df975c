#include "models/architectures/opt.h"

#include "base/status.h"
#include "models/decoder.h"

namespace treadle {

absl::Status OptLayer(const LayerPass& p, const LayerWeights& w) {
  // hidden += W_o attention(W_q n, W_k n, W_v n), n = norm(hidden).
  p.Normalize(w.attention_norm, p.hidden, p.attention_in);
  p.MatMul(p.attention_in, {w.q.To(p.q), w.k.To(p.k), w.v.To(p.v)});
  p.Attend();
  TREADLE_RETURN_IF_ERROR(p.AddProduct(w.out, p.attended));
  // hidden += W_down relu(W_up norm(hidden)).
  p.Normalize(w.ffn_norm, p.hidden, p.ffn_in);
  p.MatMul(p.ffn_in, {w.up.To(p.up)});
  p.backend.Relu(p.up, p.inner);
  return p.AddProduct(w.down, p.inner);
}

}  // namespace treadle
