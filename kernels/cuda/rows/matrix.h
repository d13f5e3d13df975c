// Matrices of f32 as kernels on rows see them, and groups of four columns of a row.
//
// Columns are dealt out in such groups, whatever a row's alignment, so that the order of every sum
// depends on the number of columns alone (N1); a group is one 16-byte access where it can be.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/cuda/rows/row_output.h"
#include "kernels/cuda/runtime/simt.h"
#include "kernels/tensor.h"

namespace treadle::cuda {

struct Matrix {
  float* data = nullptr;
  int64_t stride = 0;
  TREADLE_DEVICE float* Row(int64_t row) const { return data + row * stride; }
};

inline Matrix MatrixOf(const Tensor& tensor) {
  TREADLE_CHECK(tensor.dtype == DType::kF32);
  return {static_cast<float*>(tensor.data), tensor.stride};
}

constexpr int kGroup = 4;
inline int64_t Groups(int64_t cols) { return (cols + kGroup - 1) / kGroup; }

TREADLE_DEVICE bool IsAligned(const float* p) { return (reinterpret_cast<uintptr_t>(p) & 15) == 0; }

// Columns [column, column + 4) of a row; 0 beyond its end.
TREADLE_DEVICE void LoadGroup(const float* row, int column, int cols, float (&x)[kGroup]) {
  if (column + kGroup <= cols && IsAligned(row + column)) {
    simt::LoadFloats(row + column, x);
    return;
  }
  TREADLE_UNROLL
  for (int i = 0; i < kGroup; ++i) x[i] = column + i < cols ? row[column + i] : 0.0f;
}

TREADLE_DEVICE void StoreGroup(const RowOutput& out, int64_t row_index, int column, int cols,
                               const float (&x)[kGroup]) {
  const int64_t first = row_index * out.stride;
  if (out.dtype != DType::kF32) {  // whole groups, aligned
    auto* to = static_cast<uint16_t*>(out.data) + first + column;
    *reinterpret_cast<simt::Words2*>(to) = {RoundPair(out.dtype, x[0], x[1]),
                                            RoundPair(out.dtype, x[2], x[3])};
    return;
  }
  float* row = static_cast<float*>(out.data) + first;
  if (column + kGroup <= cols && IsAligned(row + column)) {
    simt::StoreFloats(x, row + column);
    return;
  }
  TREADLE_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    if (column + i < cols) row[column + i] = x[i];
  }
}

}  // namespace treadle::cuda
