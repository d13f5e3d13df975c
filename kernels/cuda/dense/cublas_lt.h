// cuBLASLt: products of many rows.
//
// One per device. Its workspace is allocated once; an algorithm is chosen once for every (shape,
// bucket of rows, type, epilogue) and kept, so the steady state asks the library for nothing. All
// of it can be captured in a graph. The library promises nothing across row counts: the same row
// may have other bits in another batch.
//
// Two implementations: cublas_lt.cc, and emulation/cublas_lt_emulated.cc for tests, whose order of
// sums depends on the number of rows, too. Thread safety: the rank's thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/dtype.h"

namespace treadle::cuda {

// out = x W^T + bias (+ out if accumulate). Products of floats have sums in f32; f32 without TF32.
// Products of int8 (for benchmarks) have sums in int32, and neither bias nor accumulate; n, k,
// strides and addresses are multiples of four.
struct LibraryProduct {
  const void* weights = nullptr;  // [n, weight_stride] in `dtype`
  int64_t weight_stride = 0;
  const void* x = nullptr;  // [rows, x_stride] in `dtype`
  int64_t x_stride = 0;
  const float* bias = nullptr;  // [n] or null
  void* out = nullptr;          // [rows, out_stride] f32; kI8: int32
  int64_t out_stride = 0;
  DType dtype = DType::kBF16;
  int64_t rows = 0;
  int64_t n = 0;
  int64_t k = 0;
  bool accumulate = false;
};

class CublasLt {
 public:
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;

  // Errors: no handle, or no memory for the workspace; with the library's own words.
  static absl::StatusOr<std::unique_ptr<CublasLt>> Create(Device& device);
  virtual ~CublasLt() = default;

  // False, and nothing was launched, if the library has no algorithm for this product.
  virtual bool Multiply(const LibraryProduct& product) = 0;
};

// How many rows an algorithm is chosen for: the next power of two, at least 32.
inline constexpr int64_t RowBucket(int64_t rows) {
  int64_t bucket = 32;
  while (bucket < rows) bucket *= 2;
  return bucket;
}

}  // namespace treadle::cuda
