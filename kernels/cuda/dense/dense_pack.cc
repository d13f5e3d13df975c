#include "kernels/cuda/dense/dense_pack.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/cuda/dense/dense_kernels.h"

namespace treadle::cuda {
namespace {

template <typename T>
void Put(T value, int64_t at, std::byte* row) {
  std::memcpy(row + at * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

void Round(const float* values, int64_t count, DType dtype, std::byte* row) {
  switch (dtype) {
    case DType::kBF16:
      for (int64_t i = 0; i < count; ++i) Put(ToBFloat16(values[i]), i, row);
      return;
    case DType::kF16:
      for (int64_t i = 0; i < count; ++i) Put(ToHalf(values[i]), i, row);
      return;
    default:
      std::memcpy(row, values, static_cast<size_t>(count) * sizeof(float));
  }
}

void PackRange(const MatrixSource& source, DType dtype, int64_t begin, int64_t count,
               std::byte* out) {
  const int64_t size = static_cast<int64_t>(SizeOf(dtype));
  const int64_t row_bytes = DenseStride(source.k) * size;
  const bool as_it_is = source.format->name == Name(dtype) && !source.transposed;
  std::vector<float> values(static_cast<size_t>(as_it_is ? 0 : source.k));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = source.SourceRow(begin + i);
    std::byte* row = out + i * row_bytes;
    if (as_it_is) {
      std::memcpy(row, source.data + from * source.k * size, static_cast<size_t>(source.k * size));
    } else {
      DecodeSourceRow(source, from, values.data());
      Round(values.data(), source.k, dtype, row);
    }
    std::memset(row + source.k * size, 0, static_cast<size_t>(row_bytes - source.k * size));
  }
}

}  // namespace

void PackDenseRows(const MatrixSource& source, DType dtype, int64_t begin, int64_t count,
                   int threads, std::byte* out) {
  const int64_t row_bytes = DenseStride(source.k) * static_cast<int64_t>(SizeOf(dtype));
  const int64_t pieces = std::clamp<int64_t>(threads, 1, count);
  std::vector<std::jthread> others;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t from = count * piece / pieces;
    const int64_t to = count * (piece + 1) / pieces;
    const auto pack = [&source, dtype, begin, from, to, row_bytes, out] {
      PackRange(source, dtype, begin + from, to - from, out + from * row_bytes);
    };
    if (piece + 1 == pieces) {
      pack();
    } else {
      others.emplace_back(pack);
    }
  }
}

}  // namespace treadle::cuda
