// Latent attention, with each head's matrices of keys and values in its query and its result: the
// cache is read as it is (DeepSeek-AI 2024, DeepSeek-V2, section 2.1.2).
#include <algorithm>
#include <cmath>

#include "base/status.h"
#include "models/decoder.h"

namespace treadle {
namespace {

// [num_tokens, heads * cols] as [num_tokens * heads, cols].
Tensor HeadsOf(const Tensor& x, int64_t heads) {
  TREADLE_CHECK(x.stride == x.cols);
  return DenseTensor(x.data, x.dtype, x.rows * heads, x.cols / heads);
}

}  // namespace

void LayerPass::MultiplyByHead(Tensor x, std::span<const Linear> weights, Tensor out) const {
  const auto heads = std::ssize(weights);
  const int64_t rows = out.rows / heads;
  const Tensor sorted = DenseTensor(by_head.data, DType::kF32, x.rows, x.cols);
  backend.Gather(x, head_rows, sorted);
  std::vector<Projection> products;
  for (int64_t head = 0; head < heads; ++head) {
    const Tensor own = {out.Row<float>(head), out.dtype, rows, out.cols, heads * out.stride};
    products.push_back({.weight = &weights[static_cast<size_t>(head)].weight(),
                        .out = own,
                        .first_row = head * rows});
  }
  backend.MatMul(sorted, products);
}

absl::Status LayerPass::AddLatent(const LayerWeights& w, Tensor x) const {
  // hidden += W_o [W_UV softmax(q K^T) C], q = [rotate(q_r), W_UK^T q_c] of each head, [q_r, q_c]
  // of W_q x or of W_q norm(W_down x), K = [rotate(k_r), C], [k_r, norm^-1(C)] of W_k x.
  if (w.query_down.loaded()) {
    MatMul(x, {w.query_down.To(query_latent), w.k.To(k)});
    Normalize(w.query_norm, query_latent, query_latent);
    MatMul(query_latent, {w.q.To(q)});
  } else {
    MatMul(x, {w.q.To(q), w.k.To(k)});
  }
  const int64_t rotated = config.rope_dim, dim = config.latent_dim;
  const Tensor latents = k.Cols(rotated, dim);
  Normalize(w.latent_norm, latents, latents);
  const auto heads = std::ssize(w.key_up);
  const Tensor own = HeadsOf(q, heads), of_latents = HeadsOf(latent_q, heads);
  backend.Copy(own.Cols(0, rotated), of_latents.Cols(0, rotated));
  MultiplyByHead(own.Cols(rotated, config.unrotated_dim), w.key_up, of_latents.Cols(rotated, dim));
  backend.RotateAndStoreKv(latent_q, k, Tensor(), rotary, kv);
  double scale = 1 / std::sqrt(static_cast<double>(config.query_scalar));
  if (config.yarn && config.yarn->score_scale > 0) {
    const double factor = Yarn::AttentionFactor(config.yarn->factor, config.yarn->score_scale);
    scale *= factor * factor;
  }
  backend.Attention(latent_q, kv, static_cast<float>(scale), attended);
  MultiplyByHead(HeadsOf(attended, heads), w.value_up, HeadsOf(values, heads));
  return AddProduct(w.out, values, w.post_attention_norm);
}

absl::Status Decoder::LoadByHead(WeightLoader& loader, WeightLoader::LinearSpec spec,
                                 std::vector<Linear>& heads) const {
  const int64_t each = spec.n / config_.heads;
  spec.rows.clear();
  for (int64_t head = heads_.begin; head < heads_.end; ++head) {
    spec.rows.push_back({head * each, (head + 1) * each});
  }
  TREADLE_ASSIGN_OR_RETURN(heads, loader.LoadLinears(spec));
  return absl::OkStatus();
}

absl::Status Decoder::AllocateLatents() {
  if (config_.latent_dim == 0) return absl::OkStatus();
  const int64_t heads = heads_.size();
  TREADLE_ASSIGN_OR_RETURN(query_latent_, activations_->Add(config_.query_latent_dim));
  TREADLE_ASSIGN_OR_RETURN(latent_q_, activations_->Add(heads * config_.head_dim));
  TREADLE_ASSIGN_OR_RETURN(
      by_head_, activations_->Add(heads * std::max(config_.latent_dim, config_.unrotated_dim)));
  TREADLE_ASSIGN_OR_RETURN(values_, activations_->Add(heads * config_.value_dim));
  return absl::OkStatus();
}

// Sets head_rows_ for so many tokens.
void Decoder::OrderByHead(int64_t rows) {
  const int64_t heads = heads_.size();
  if (std::ssize(head_rows_) == rows * heads) return;
  head_rows_.resize(static_cast<size_t>(rows * heads));
  for (int64_t i = 0; i < rows * heads; ++i) {
    head_rows_[static_cast<size_t>(i)] = static_cast<int32_t>(i % rows * heads + i / rows);
  }
}

}  // namespace treadle
