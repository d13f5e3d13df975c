// Buffers for one iteration's activations, sized once. Thread safety: confined to the rank's
// thread.
#pragma once

#include <vector>

#include "kernels/backend.h"

namespace treadle {

class Activations {
 public:
  Activations(Backend& backend, int64_t max_rows) : backend_(backend), max_rows_(max_rows) {}

  // A buffer for [max_rows, cols] f32.
  absl::StatusOr<Tensor> Add(int64_t cols) {
    const size_t bytes = static_cast<size_t>(max_rows_ * cols) * sizeof(float);
    auto buffer = backend_.Allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    bytes_ += bytes;
    buffers_.push_back(*std::move(buffer));
    return DenseTensor(buffers_.back().data(), DType::kF32, max_rows_, cols);
  }
  uint64_t bytes() const { return bytes_; }

 private:
  Backend& backend_;
  const int64_t max_rows_;
  std::vector<Buffer> buffers_;
  uint64_t bytes_ = 0;
};

}  // namespace treadle
