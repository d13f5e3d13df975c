#include "models/architectures/gpt2.h"

#include "base/status.h"
#include "models/decoder.h"

namespace treadle {

absl::Status Gpt2Layer(const LayerPass& p, const LayerWeights& w) {
  // hidden += W_o attention(W_qkv norm(hidden)).
  p.Normalize(w.attention_norm, p.hidden, p.attention_in);
  p.MatMul(p.attention_in, {w.qkv.To(p.qkv)});
  p.Attend();
  TREADLE_RETURN_IF_ERROR(p.AddProduct(w.out, p.attended));
  // hidden += W_down gelu(W_up norm(hidden)).
  p.Normalize(w.ffn_norm, p.hidden, p.ffn_in);
  p.MatMul(p.ffn_in, {w.up.To(p.up)});
  p.backend.Gelu(p.up, p.inner);
  return p.AddProduct(w.down, p.inner);
}

}  // namespace treadle
