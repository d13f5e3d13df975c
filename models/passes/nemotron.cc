#include "models/architectures/nemotron.h"

#include "base/status.h"
#include "models/decoder.h"

namespace treadle {

absl::Status NemotronLayer(const LayerPass& p, const LayerWeights& w) {
  // hidden += block(norm(hidden)), the block one of four.
  if (w.router.loaded()) {
    p.Normalize(w.attention_norm, p.hidden, p.ffn_in);
    return p.AddExperts(w);
  }
  if (w.up.loaded()) {  // W_down max(W_up n, 0)^2
    p.Normalize(w.attention_norm, p.hidden, p.ffn_in);
    p.MatMul(p.ffn_in, {w.up.To(p.up)});
    SquaredRelu(p.backend, p.up, p.inner);
    return p.AddProduct(w.down, p.inner);
  }
  p.Normalize(w.attention_norm, p.hidden, p.attention_in);
  if (w.state_input.loaded()) return p.AddState(w, p.attention_in);
  p.MatMul(p.attention_in, {w.q.To(p.q), w.k.To(p.k), w.v.To(p.v)});
  p.Attend();
  return p.AddProduct(w.out, p.attended);
}

}  // namespace treadle
