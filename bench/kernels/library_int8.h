// LLM.int8()'s product as a user of the vendor's library puts it together, in three launches:
// activations become codes and a scale per row, cuBLASLt multiplies codes to sums of 32 bits, and
// these become floats. What our own product is measured against; no backend uses it.
//
// It takes no outliers out, as if the threshold were 0. So it does less than LLM.int8(), and what
// bitsandbytes makes of the same library does more than this. Without outliers its results are the
// bits of ActivationPolicy::kRowInt8 (kernels/backend.h).
//
// Thread safety: as the device's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/cuda/dense/cublas_lt.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/formats/matrix_source.h"
#include "kernels/tensor.h"

namespace treadle::cuda {

// W [n, k] on the device.
struct LibraryInt8Weights {
  Buffer codes = {};   // [n, k] int8
  Buffer scales = {};  // [n] f32
  int64_t n = 0;
  int64_t k = 0;
};

class LibraryInt8 {
 public:
  // Scratch for products of up to so much. Errors: CublasLt's, no memory.
  static absl::StatusOr<std::unique_ptr<LibraryInt8>> Create(Device& device, int64_t max_rows,
                                                             int64_t max_n, int64_t max_k);

  // LLM.int8() matrices of one k, stacked: the first one's features come first. Errors: no memory.
  absl::StatusOr<LibraryInt8Weights> Upload(std::span<const MatrixSource> sources);
  absl::StatusOr<LibraryInt8Weights> Copy(const LibraryInt8Weights& weights);

  // out = x W^T + bias (+ out if accumulate). x: [rows, k], bias: [n] or null, out: [rows, n], f32.
  // False, and `out` is as it was, if the library has no algorithm; n and k that are no multiples
  // of four have none.
  bool Multiply(const Tensor& x, const LibraryInt8Weights& weights, const float* bias,
                bool accumulate, const Tensor& out);

 private:
  LibraryInt8(Device& device, std::unique_ptr<CublasLt> library)
      : device_(device), library_(std::move(library)) {}

  Device& device_;
  const std::unique_ptr<CublasLt> library_;
  Buffer codes_;     // [max_rows, max_k, in units of kInt8Unit] int8
  Buffer row_info_;  // [max_rows] Int8Row
  Buffer sums_;      // [max_rows, max_n] int32
};

}  // namespace treadle::cuda
