// A matrix on a device, of f32 or a 16-bit type, with guard values around every row, and its
// initial contents on the host, as floats.
#pragma once

#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/backend.h"

namespace treadle {

// Guards are NaN of a known payload: read by mistake they spoil a result, written over they are
// missed.
inline constexpr uint32_t kGuardBits = 0x7fc0beef;

// The use that an op makes of a matrix.
enum class Role : uint8_t { kInput, kOutput, kLost };  // kLost: its contents are spent

// Confined to its backend's thread.
class GuardedTensor {
 public:
  GuardedTensor(Backend& backend, std::string_view name, Role role, int64_t rows, int64_t cols,
                DType dtype = DType::kF32)
      : backend_(backend),
        name_(name),
        role_(role),
        dtype_(dtype),
        rows_(rows),
        cols_(cols),
        stride_(cols + 16) {
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
    std::vector<std::byte> rounded(initial_.size() * SizeOf(dtype_));
    for (size_t i = 0; i < initial_.size(); ++i) {
      StoreElement(dtype_, initial_[i], rounded.data(), static_cast<int64_t>(i));
    }
    backend_.CopyToDevice(device_.data(), rounded.data(), rounded.size());
  }

  std::string_view name() const { return name_; }
  Role role() const { return role_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t stride() const { return stride_; }
  DType dtype() const { return dtype_; }
  double bytes() const { return static_cast<double>(rows_ * cols_ * SizeOf(dtype_)); }
  Tensor view() const {
    std::byte* first = device_.data() + stride_ * static_cast<int64_t>(SizeOf(dtype_));
    return {first, dtype_, rows_, cols_, stride_};
  }
  Tensor Rows(int64_t begin, int64_t count) const { return view().Rows(begin, count); }

  // [rows + 2, stride], guards included: as uploaded, and all that lies on the device.
  const std::vector<float>& initial() const { return initial_; }
  const Buffer& device() const { return device_; }

 private:
  Backend& backend_;
  const std::string_view name_;
  const Role role_;
  const DType dtype_;
  const int64_t rows_;
  const int64_t cols_;
  const int64_t stride_;
  std::vector<float> initial_;
  Buffer device_;
};

}  // namespace treadle
