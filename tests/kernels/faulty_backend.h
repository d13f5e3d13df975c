// The reference with one fault in its RmsNorm, Attention or CopyPages, or with rounded inputs: what
// the op-case checks must notice.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "kernels/forwarding_backend.h"
#include "kernels/reference/reference_backend.h"

namespace treadle {

// Each function, if set, runs after the reference's op.
struct Faults {
  std::function<void(Tensor x, Tensor out)> rms_norm = {};
  std::function<void(const KvView& kv, Tensor out)> attention = {};
  std::function<void(const KvLayout& layout, std::byte* pages)> copy_pages = {};
  // If not kF32: products and Attention see their input rounded to it.
  DType input = DType::kF32;
};

class FaultyBackend final : public ForwardingBackend {
 public:
  explicit FaultyBackend(Faults faults)
      : ForwardingBackend(CreateReferenceBackend()), faults_(std::move(faults)) {}

  void RmsNorm(Tensor x, const float* weight, float eps, bool accumulate, Tensor out) override {
    ForwardingBackend::RmsNorm(x, weight, eps, accumulate, out);
    if (faults_.rms_norm) faults_.rms_norm(x, out);
  }
  void MatMul(Tensor x, std::span<const Projection> projections) override {
    std::vector<float> memory;
    ForwardingBackend::MatMul(Rounded(x, memory), projections);
  }
  void Attention(Tensor q, const KvView& kv, float scale, Tensor out) override {
    std::vector<float> memory;
    ForwardingBackend::Attention(Rounded(q, memory), kv, scale, out);
    if (faults_.attention) faults_.attention(kv, out);
  }
  void CopyPages(const KvLayout& layout, std::byte* pages,
                 std::span<const PageCopy> copies) override {
    ForwardingBackend::CopyPages(layout, pages, copies);
    if (faults_.copy_pages) faults_.copy_pages(layout, pages);
  }

 private:
  // x, or what is left of it, in `memory`.
  Tensor Rounded(Tensor x, std::vector<float>& memory) const {
    if (faults_.input == DType::kF32) return x;
    for (int64_t row = 0; row < x.rows; ++row) {
      for (int64_t i = 0; i < x.cols; ++i) {
        const float value = x.Row<float>(row)[i];
        memory.push_back(faults_.input == DType::kF16 ? ToFloat(ToHalf(value))
                                                      : ToFloat(ToBFloat16(value)));
      }
    }
    return DenseTensor(memory.data(), DType::kF32, x.rows, x.cols);
  }

  const Faults faults_;
};

}  // namespace treadle
