// Buffers for one iteration's activations, sized once. Thread safety: confined to the rank's
// thread.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/backend.h"

namespace treadle {

class Activations {
 public:
  Activations(Backend& backend, int64_t max_rows) : backend_(backend), max_rows_(max_rows) {}

  // A buffer for [max_rows, cols] f32.
  absl::StatusOr<Tensor> Add(int64_t cols) {
    Tensor tensor;
    TREADLE_RETURN_IF_ERROR(AddTogether({{&tensor, cols}}, 0));
    return tensor;
  }
  // One buffer of at least `least_bytes` for several such tensors, the first at its beginning.
  absl::Status AddTogether(std::initializer_list<std::pair<Tensor*, int64_t>> tensors,
                           int64_t least_bytes) {
    int64_t bytes = 0;
    for (const auto& [tensor, cols] : tensors) bytes += Bytes(cols);
    bytes = std::max({bytes, least_bytes, int64_t{1}});
    TREADLE_ASSIGN_OR_RETURN(Buffer buffer, backend_.Allocate(static_cast<size_t>(bytes)));
    std::byte* at = buffer.data();
    for (const auto& [tensor, cols] : tensors) {
      *tensor = DenseTensor(at, DType::kF32, max_rows_, cols);
      at += Bytes(cols);
    }
    bytes_ += static_cast<uint64_t>(bytes);
    buffers_.push_back(std::move(buffer));
    return absl::OkStatus();
  }
  uint64_t bytes() const { return bytes_; }

 private:
  // Bytes of a tensor, up to where another may begin.
  int64_t Bytes(int64_t cols) const {
    constexpr int64_t kAlignment = 256;  // what libraries make use of
    const int64_t bytes = max_rows_ * cols * static_cast<int64_t>(sizeof(float));
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  Backend& backend_;
  const int64_t max_rows_;
  std::vector<Buffer> buffers_;
  uint64_t bytes_ = 0;
};

// The first rows of an activation's memory as rows of `type`, which is no larger than its own.
inline Tensor RowsAs(DType type, const Tensor& activation, int64_t rows) {
  TREADLE_CHECK(activation.stride == activation.cols && rows <= activation.rows);
  return DenseTensor(activation.data, type, rows, activation.cols);
}

}  // namespace treadle
