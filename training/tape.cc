#include "training/tape.h"

#include <algorithm>
#include <numeric>

namespace treadle {
namespace {

void CopyRows(const Tensor& from, const Tensor& to) {
  for (int64_t i = 0; i < from.rows; ++i) {
    std::copy_n(from.Row<float>(i), from.cols, to.Row<float>(i));
  }
}

void AddRows(const Tensor& from, const Tensor& to) {
  for (int64_t i = 0; i < from.rows; ++i) {
    for (int64_t k = 0; k < from.cols; ++k) to.Row<float>(i)[k] += from.Row<float>(i)[k];
  }
}

Tensor DenseIn(std::vector<float>& memory, int64_t rows, int64_t cols) {
  memory.resize(std::max(memory.size(), static_cast<size_t>(rows * cols)));
  return DenseTensor(memory.data(), DType::kF32, rows, cols);
}

}  // namespace

absl::StatusOr<Buffer> Tape::Allocate(size_t bytes) {
  constexpr size_t kAlignment = 4096;
  const size_t shadow = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  TREADLE_ASSIGN_OR_RETURN(Buffer both, below().Allocate(shadow + bytes));
  std::byte* const data = both.data();
  shadows_[data] = shadow;
  auto owner = std::make_shared<Buffer>(std::move(both));
  return Buffer(data, bytes, [this, owner](void* memory) {
    shadows_.erase(static_cast<const std::byte*>(memory));
  });
}

Tensor Tape::Gradient(const Tensor& value) const {
  TREADLE_CHECK(value.dtype == DType::kF32);
  auto* const data = static_cast<std::byte*>(value.data);
  const auto after = shadows_.upper_bound(data);
  TREADLE_CHECK(after != shadows_.begin());
  const auto& [begin, shadow] = *std::prev(after);
  TREADLE_CHECK(data < begin + shadow);
  Tensor gradient = value;
  gradient.data = data + shadow;
  return gradient;
}

Tensor Tape::Save(const Tensor& value) {
  if (saved_count_ == saved_.size()) saved_.emplace_back();
  const Tensor copy = DenseIn(saved_[saved_count_++], value.rows, value.cols);
  CopyRows(value, copy);
  return copy;
}

Tensor Tape::Take(const Tensor& out, bool accumulate) {
  const Tensor gradient = Gradient(out);
  if (accumulate) return gradient;
  const Tensor taken = DenseIn(taken_, out.rows, out.cols);
  CopyRows(gradient, taken);
  for (int64_t i = 0; i < out.rows; ++i) std::fill_n(gradient.Row<float>(i), out.cols, 0.0f);
  return taken;
}

void Tape::Backward() {
  recording_ = false;
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) (*step)();
  steps_.clear();
  saved_count_ = 0;
}

void Tape::RmsNorm(Tensor x, const float* weight, float eps, bool accumulate, Tensor out) {
  if (recording_) {
    steps_.push_back([=, this, saved = Save(x)] {
      const Tensor dy = Take(out, accumulate);
      gradients_->RmsNormGradient(saved, weight, eps, dy, Gradient(x));
    });
  }
  below().RmsNorm(x, weight, eps, accumulate, out);
}

void Tape::MatMul(Tensor x, std::span<const Projection> projections) {
  below().MatMul(x, projections);
  std::vector<Product> products;
  bool updated = false;
  for (const Projection& p : projections) {
    TREADLE_CHECK(p.first_row == 0 || !recording_);
    const auto found = updates_.find(p.weight);
    const LowRankUpdate* const update = found == updates_.end() ? nullptr : found->second;
    if (update != nullptr) {
      rows_.resize(static_cast<size_t>(p.out.rows));
      std::iota(rows_.begin(), rows_.end(), 0);
      const LowRankProduct more[] = {{update->factors, rows_, p.out}};
      below().AddLowRank(x, more);
    }
    updated |= update != nullptr;
    products.push_back({p.weight, update, p.out, p.accumulate});
  }
  if (!recording_) return;
  const Tensor saved = updated ? Save(x) : Tensor();
  steps_.push_back(
      [this, x, saved, products = std::move(products)] { MatMulBackward(x, saved, products); });
}

void Tape::MatMulBackward(const Tensor& x, const Tensor& saved, std::span<const Product> products) {
  const Tensor dx = Gradient(x);
  for (const Product& p : products) {
    const Tensor dy = Take(p.out, p.accumulate);
    gradients_->ProductGradient(*p.weight, dy, dx);
    if (p.update != nullptr) gradients_->LowRankGradient(*p.update, saved, dy, dx);
  }
}

void Tape::RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                            const KvView& kv) {
  below().RotateAndStoreKv(q, k, v, rotary, kv);
  if (!recording_) return;
  steps_.push_back([=, this] {
    const int64_t dim = kv.layout.head_dim;
    if (rotary != nullptr) gradients_->RotateBack(Gradient(q), dim, *rotary, kv.sequences);
    if (kv.layout.kv_heads == 0) return;  // nothing was stored
    const Tensor dk = DenseIn(key_gradient_, k.rows, k.cols);
    if (rotary != nullptr) gradients_->RotateBack(dk, dim, *rotary, kv.sequences);
    AddRows(dk, Gradient(k));
    AddRows(DenseIn(value_gradient_, v.rows, v.cols), Gradient(v));
  });
}

void Tape::Attention(Tensor q, const KvView& kv, float scale, Tensor out) {
  if (recording_) {
    steps_.push_back([=, this, saved = Save(q)] {
      const int64_t cols = kv.layout.kv_heads * kv.layout.head_dim;
      const Tensor dk = DenseIn(key_gradient_, q.rows, cols);
      const Tensor dv = DenseIn(value_gradient_, q.rows, cols);
      std::ranges::fill(key_gradient_, 0.0f);
      std::ranges::fill(value_gradient_, 0.0f);
      const Tensor dout = Take(out, false);
      gradients_->AttentionGradient(saved, kv, scale, dout, Gradient(q), dk, dv);
    });
  }
  below().Attention(q, kv, scale, out);
}

void Tape::Gated(bool gelu, Tensor gate, Tensor up, Tensor out) {
  if (recording_) {
    steps_.push_back([=, this, saved_gate = Save(gate), saved_up = Save(up)] {
      const Tensor dout = Take(out, false);
      gradients_->GatedGradient(gelu, saved_gate, saved_up, dout, Gradient(gate), Gradient(up));
    });
  }
  if (gelu) {
    below().GeGlu(gate, up, out);
  } else {
    below().SwiGlu(gate, up, out);
  }
}

}  // namespace treadle
