// Matrices for the tests of products on the emulated device.
#pragma once

#include <cstring>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "kernels/cuda/runtime/device.h"
#include "kernels/dtype.h"
#include "kernels/formats/matrix_source.h"
#include "kernels/op_cases/random.h"
#include "tests/emulation/emulated_device.h"

namespace treadle::cuda {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr int64_t kGap = 3;  // between rows of results
inline constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

inline std::unique_ptr<Device> OpenDevice(const EmulationSettings& settings = {}) {
  ScopedEmulation emulation(settings);
  return Device::Open(0).value();
}

inline float Rounded(float x, DType dtype) {
  if (dtype == DType::kBF16) return ToFloat(ToBFloat16(x));
  if (dtype == DType::kF16) return ToFloat(ToHalf(x));
  return x;
}

// A matrix in a dense format, and its values.
struct Weights {
  Weights(std::string_view format, int64_t n, int64_t k, uint64_t seed, bool transposed = false)
      : values(static_cast<size_t>(n * k)) {
    Random random(seed);
    source = {.format = FindWeightFormat(format), .n = n, .k = k, .transposed = transposed};
    const bool wide = format == "f32";
    const DType type = format == "f16" ? DType::kF16 : wide ? DType::kF32 : DType::kBF16;
    bytes.resize(values.size() * SizeOf(type));
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        const float x = Rounded(random.Normal(), type);
        values[row * k + i] = x;
        const int64_t at = transposed ? i * n + row : row * k + i;
        const uint16_t half = type == DType::kF16 ? ToHalf(x).bits : ToBFloat16(x).bits;
        std::memcpy(&bytes[at * SizeOf(type)], wide ? static_cast<const void*>(&x) : &half,
                    SizeOf(type));
      }
    }
    source.data = bytes.data();
  }
  float At(int64_t row, int64_t i) const { return values[source.SourceRow(row) * source.k + i]; }

  std::vector<float> values;  // [n, k]
  std::vector<std::byte> bytes;
  MatrixSource source;
};

// A float matrix on the device whose rows are `gap` elements apart, the gaps full of NaN.
struct Matrix {
  Matrix(Device& on, int64_t rows, int64_t cols, int64_t gap, uint64_t seed)
      : device(on), stride(cols + gap), host(static_cast<size_t>(rows * stride), kNan) {
    Random random(seed);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < cols; ++i) host[row * stride + i] = random.Normal();
    }
    buffer = on.Allocate(host.size() * sizeof(float)).value();
    view = {buffer.data(), DType::kF32, rows, cols, stride};
    Upload();
  }
  float* Row(int64_t row) { return host.data() + row * stride; }
  void Upload() { device.CopyToDevice(buffer.data(), host.data(), host.size() * sizeof(float)); }
  std::vector<float> Download() const {
    std::vector<float> now(host.size());
    device.CopyToHost(now.data(), buffer.data(), now.size() * sizeof(float));
    return now;
  }

  Device& device;
  int64_t stride;
  std::vector<float> host;
  Buffer buffer;
  Tensor view;
};

}  // namespace treadle::cuda
