// Views of activations. Every activation is a matrix [rows, cols]: tokens of all requests lie flat
// (ORCA section 3, selective batching), so rank 2 is all there is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "kernels/dtype.h"

namespace treadle {

// A non-owning [rows, cols] matrix on a backend's device; `stride` counts elements between rows.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  template <typename T>
  T* Row(int64_t row) const {
    return static_cast<T*>(data) + row * stride;
  }
  // Rows [begin, begin + count).
  Tensor Rows(int64_t begin, int64_t count) const {
    TREADLE_CHECK(begin >= 0 && count >= 0 && begin + count <= rows);
    return {static_cast<std::byte*>(data) + begin * stride * static_cast<int64_t>(SizeOf(dtype)),
            dtype, count, cols, stride};
  }
  // Columns [begin, begin + count) of every row.
  Tensor Cols(int64_t begin, int64_t count) const {
    TREADLE_CHECK(begin >= 0 && count >= 0 && begin + count <= cols);
    return {static_cast<std::byte*>(data) + begin * static_cast<int64_t>(SizeOf(dtype)), dtype,
            rows, count, stride};
  }
};

inline Tensor DenseTensor(void* data, DType dtype, int64_t rows, int64_t cols) {
  return {data, dtype, rows, cols, cols};
}

}  // namespace treadle
