// How elementwise and row-wise ops are split over the pool; no split ever changes a bit.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/tensor.h"

namespace treadle {

// Below this many elements an op runs on the caller alone: waking the pool would cost more.
inline constexpr int64_t kSerialElements = 8192;

// Calls body(begin row, end row) for parts of [0, rows), or once for all where the op is small.
template <typename Body>
void SplitRows(ThreadPool& pool, int64_t rows, int64_t cols, Body body) {
  if (rows == 0) return;
  if (rows * cols < kSerialElements) {
    body(int64_t{0}, rows);
  } else {
    pool.ParallelFor(rows, 1, body);
  }
}

// For elementwise ops: body(row, first column, number of columns). One large row is split too.
template <typename Body>
void SplitElements(ThreadPool& pool, int64_t rows, int64_t cols, Body body) {
  if (rows == 1 && cols >= kSerialElements) {
    pool.ParallelFor(cols, 16, [&](int64_t begin, int64_t end) { body(0, begin, end - begin); });
    return;
  }
  SplitRows(pool, rows, cols, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row, 0, cols);
  });
}

inline void CheckSameShape(const Tensor& a, const Tensor& b) {
  TREADLE_CHECK(a.rows == b.rows && a.cols == b.cols);
  TREADLE_CHECK(a.dtype == DType::kF32 && b.dtype == DType::kF32);
}

}  // namespace treadle
