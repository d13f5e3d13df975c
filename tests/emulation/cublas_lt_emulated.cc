// cuBLASLt's stand-in on the host. Its order of sums depends on the number of rows, because the
// library's may: a test of batch invariance that runs through it fails.
#include <utility>

#include "base/status.h"
#include "kernels/cuda/dense/cublas_lt.h"
#include "tests/emulation/emulated_device.h"

namespace treadle::cuda {
namespace {

float Element(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kBF16:
      return ToFloat(static_cast<const BFloat16*>(data)[at]);
    case DType::kF16:
      return ToFloat(static_cast<const Half*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

void Run(const LibraryProduct& product) {
  const int64_t parts = 1 + product.rows % 5;  // a split over k
  for (int64_t row = 0; row < product.rows; ++row) {
    for (int64_t n = 0; n < product.n; ++n) {
      float y = 0;
      for (int64_t part = 0; part < parts; ++part) {
        float sum = 0;
        for (int64_t k = part; k < product.k; k += parts) {
          sum += Element(product.weights, product.dtype, n * product.weight_stride + k) *
                 Element(product.x, product.dtype, row * product.x_stride + k);
        }
        y += sum;
      }
      float& out = static_cast<float*>(product.out)[row * product.out_stride + n];
      if (product.accumulate) y += out;
      if (product.bias != nullptr) y += product.bias[n];
      out = y;
    }
  }
}

// Exact, so in any order.
void RunInt8(const LibraryProduct& product) {
  const auto* weights = static_cast<const int8_t*>(product.weights);
  const auto* x = static_cast<const int8_t*>(product.x);
  for (int64_t row = 0; row < product.rows; ++row) {
    for (int64_t n = 0; n < product.n; ++n) {
      int32_t sum = 0;
      for (int64_t k = 0; k < product.k; ++k) {
        sum += weights[n * product.weight_stride + k] * x[row * product.x_stride + k];
      }
      static_cast<int32_t*>(product.out)[row * product.out_stride + n] = sum;
    }
  }
}

bool TakesInt8(const LibraryProduct& product) {
  const int64_t counts =
      product.n | product.k | product.weight_stride | product.x_stride | product.out_stride;
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(product.weights) |
                              reinterpret_cast<uintptr_t>(product.x) |
                              reinterpret_cast<uintptr_t>(product.out);
  return ((static_cast<uintptr_t>(counts) | addresses) & 3) == 0;
}

class EmulatedCublasLt final : public CublasLt {
 public:
  EmulatedCublasLt(Device& device, Buffer workspace)
      : device_(device), workspace_(std::move(workspace)) {}
  bool Multiply(const LibraryProduct& product) override {
    const bool int8 = product.dtype == DType::kI8;
    TREADLE_CHECK(!int8 || (product.bias == nullptr && !product.accumulate));
    if (refuses_ || (int8 && !TakesInt8(product))) return false;
    device_.RunOnHost([product, int8] { int8 ? RunInt8(product) : Run(product); });
    return true;
  }

 private:
  const bool refuses_ = CurrentEmulation().library_refuses;
  Device& device_;
  const Buffer workspace_;  // as much memory as the real one takes
};

}  // namespace

absl::StatusOr<std::unique_ptr<CublasLt>> CublasLt::Create(Device& device) {
  TREADLE_ASSIGN_OR_RETURN(Buffer workspace, device.Allocate(kWorkspaceBytes));
  return std::unique_ptr<CublasLt>(new EmulatedCublasLt(device, std::move(workspace)));
}

}  // namespace treadle::cuda
