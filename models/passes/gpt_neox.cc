#include "models/architectures/gpt_neox.h"

#include "base/status.h"
#include "models/decoder.h"

namespace treadle {

absl::Status GptNeoXLayer(const LayerPass& p, const LayerWeights& w) {
  // In parallel: hidden += W_o attention(W_qkv norm(hidden)) + W_down gelu(W_up norm'(hidden)).
  // Else the first is added before the second reads hidden.
  const bool parallel = p.config.parallel_residual;
  p.Normalize(w.attention_norm, p.hidden, p.attention_in);
  p.MatMul(p.attention_in, {w.qkv.To(p.qkv)});
  p.Attend();
  if (!parallel) TREADLE_RETURN_IF_ERROR(p.AddProduct(w.out, p.attended));
  p.Normalize(w.ffn_norm.loaded() ? w.ffn_norm : w.attention_norm, p.hidden, p.ffn_in);
  p.MatMul(p.ffn_in, {w.up.To(p.up)});
  p.backend.GeluErf(p.up, p.inner);
  if (parallel) TREADLE_RETURN_IF_ERROR(p.AddProduct(w.out, p.attended));
  return p.AddProduct(w.down, p.inner);
}

}  // namespace treadle
