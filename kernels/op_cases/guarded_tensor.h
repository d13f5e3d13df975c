// A matrix on a device, of f32 or a 16-bit type, with guard values around every row, and its
// initial contents on the host, as floats.
#pragma once

#include <cstring>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "base/status.h"
#include "kernels/backend.h"

namespace treadle {

// Guards are NaN of a known payload: read by mistake they spoil a result, written over they are
// missed.
inline constexpr uint32_t kGuardBits = 0x7fc0beef;

// Confined to its backend's thread.
class GuardedTensor {
 public:
  GuardedTensor(Backend& backend, int64_t rows, int64_t cols, DType dtype = DType::kF32)
      : backend_(backend), dtype_(dtype), rows_(rows), cols_(cols), stride_(cols + 16) {
    initial_.assign(static_cast<size_t>((rows + 2) * stride_), std::bit_cast<float>(kGuardBits));
    auto buffer = backend.Allocate(initial_.size() * SizeOf(dtype));
    TREADLE_CHECK(buffer.ok());
    device_ = *std::move(buffer);
  }

  // Initial contents; unset elements are guards. Upload brings them to the device.
  float* Row(int64_t row) { return initial_.data() + (row + 1) * stride_; }
  const float* Row(int64_t row) const { return initial_.data() + (row + 1) * stride_; }
  template <typename Generator>
  void Fill(Generator generate) {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t i = 0; i < cols_; ++i) Row(row)[i] = generate();
    }
  }
  void Upload() {
    if (dtype_ == DType::kF32) {
      backend_.CopyToDevice(device_.data(), initial_.data(), initial_.size() * sizeof(float));
      return;
    }
    std::vector<uint16_t> rounded;
    for (const float x : initial_) rounded.push_back(Round(x));
    backend_.CopyToDevice(device_.data(), rounded.data(), rounded.size() * sizeof(uint16_t));
  }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  DType dtype() const { return dtype_; }
  Tensor view() const {
    std::byte* first = device_.data() + stride_ * static_cast<int64_t>(SizeOf(dtype_));
    return {first, dtype_, rows_, cols_, stride_};
  }

  // Appends the rows' present contents.
  void Append(std::vector<float>& out) const {
    const std::vector<float> now = Download();
    for (int64_t row = 0; row < rows_; ++row) {
      const float* from = now.data() + (row + 1) * stride_;
      out.insert(out.end(), from, from + cols_);
    }
  }
  // `constant`: the rows must be as uploaded, too.
  absl::Status CheckGuards(std::string_view what, bool constant) const {
    const std::vector<float> now = Download();
    for (size_t i = 0; i < now.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / stride_ - 1;
      const int64_t col = static_cast<int64_t>(i) % stride_;
      const bool inside = row >= 0 && row < rows_ && col < cols_;
      if (inside && !constant) continue;
      const float before = dtype_ == DType::kF32 ? initial_[i] : Widen(Round(initial_[i]));
      if (std::memcmp(&now[i], &before, sizeof(float)) != 0) {
        return Internal(what, " [", rows_, ", ", cols_, "]: row ", row, " column ", col,
                        inside ? " of an input was changed" : " outside was written");
      }
    }
    return absl::OkStatus();
  }

 private:
  uint16_t Round(float x) const {
    return dtype_ == DType::kF16 ? ToHalf(x).bits : ToBFloat16(x).bits;
  }
  float Widen(uint16_t bits) const {
    return dtype_ == DType::kF16 ? ToFloat(Half{bits}) : ToFloat(BFloat16{bits});
  }
  std::vector<float> Download() const {
    std::vector<float> now(initial_.size());
    TREADLE_CHECK(backend_.Synchronize().ok());
    if (dtype_ == DType::kF32) {
      backend_.CopyToHost(now.data(), device_.data(), now.size() * sizeof(float));
      return now;
    }
    std::vector<uint16_t> bits(now.size());
    backend_.CopyToHost(bits.data(), device_.data(), bits.size() * sizeof(uint16_t));
    for (size_t i = 0; i < bits.size(); ++i) now[i] = Widen(bits[i]);
    return now;
  }

  Backend& backend_;
  const DType dtype_;
  const int64_t rows_;
  const int64_t cols_;
  const int64_t stride_;
  std::vector<float> initial_;  // [rows + 2, stride]
  Buffer device_;
};

}  // namespace treadle
