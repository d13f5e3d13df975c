// Shared by tests of low-bit matrices: an emulated device with a family, the canonical matrix in
// double precision, and how far from it a product may be.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/cuda/low_bit/low_bit.h"
#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"
#include "tests/emulation/emulated_device.h"

namespace treadle::cuda {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline bool IsLowBit(const WeightFormat& format) {
  return format.group > 0 || (format.apart() && format.activations == ActivationPolicy::kFloat);
}

inline std::vector<const WeightFormat*> LowBitFormats() {
  std::vector<const WeightFormat*> formats;
  for (const WeightFormat& format : WeightFormats()) {
    if (IsLowBit(format)) formats.push_back(&format);
  }
  return formats;
}

inline float Rounded(float x, DType dtype) {
  if (dtype == DType::kBF16) return ToFloat(ToBFloat16(x));
  return dtype == DType::kF16 ? ToFloat(ToHalf(x)) : x;
}

// Half of the distance between neighbours, relative.
inline double RoundingOf(DType dtype) {
  return dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-24;
}

// An emulated device with a family, and what tests put on it.
class LowBitGpu {
 public:
  explicit LowBitGpu(DType dtype, bool deterministic = false,
                     const EmulationSettings& settings = {.multiprocessors = 2},
                     std::optional<int64_t> few_rows = {})
      : dtype_(dtype) {
    ScopedEmulation emulation(settings);
    device_ = Device::Open(0).value();
    family_ = MakeLowBitFamily(
        *device_,
        {.dtype = dtype, .deterministic = deterministic, .threads = 2, .few_rows = few_rows});
  }
  Device& device() { return *device_; }
  MatMulFamily& family() { return *family_; }
  DType dtype() const { return dtype_; }

  template <typename T>
  T* Upload(const std::vector<T>& values) {
    buffers_.push_back(device_->Allocate(std::max<size_t>(values.size(), 1) * sizeof(T)).value());
    device_->CopyToDevice(buffers_.back().data(), values.data(), values.size() * sizeof(T));
    return reinterpret_cast<T*>(buffers_.back().data());
  }
  template <typename T>
  std::vector<T> Download(const T* values, size_t count) {
    std::vector<T> host(count);
    device_->CopyToHost(host.data(), values, count * sizeof(T));
    return host;
  }

  // x: [rows, k]
  MatMulInput Input(const std::vector<float>& x, int64_t k) {
    const auto rows = static_cast<int64_t>(x.size()) / k;
    MatMulInput input;
    input.x = DenseTensor(Upload(x), DType::kF32, rows, k);
    input.dtype = dtype_;
    input.stride16 = (k + 63) / 64 * 64;
    if (dtype_ == DType::kF32) return input;
    std::vector<uint16_t> x16(static_cast<size_t>(rows * input.stride16), 0);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        const float value = x[row * k + i];
        x16[row * input.stride16 + i] =
            dtype_ == DType::kBF16 ? ToBFloat16(value).bits : ToHalf(value).bits;
      }
    }
    input.x16 = Upload(x16);
    return input;
  }

 private:
  const DType dtype_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<MatMulFamily> family_;
  std::vector<Buffer> buffers_;
};

inline std::vector<float> RandomRows(int64_t rows, int64_t k, uint64_t seed) {
  Random random(seed);
  std::vector<float> x(static_cast<size_t>(rows * k));
  for (float& value : x) value = random.Normal();
  return x;
}

// The canonical matrix, and for each weight the sum of the magnitudes that it is computed from.
struct Weights {
  explicit Weights(const MatrixSource& source)
      : values(static_cast<size_t>(source.n * source.k)), magnitudes(values.size()) {
    const WeightFormat& format = *source.format;
    for (int64_t row = 0; row < source.n; ++row) {
      const int64_t from = source.SourceRow(row);
      DecodeSourceRow(source, from, values.data() + row * source.k);
      for (int64_t i = 0; i < source.k; ++i) {
        magnitudes[row * source.k + i] =
            format.apart() ? Apart(source, from * source.k + i) : Inline(source, from, i);
      }
    }
  }
  static double Apart(const MatrixSource& source, int64_t i) {
    uint8_t code;
    UnpackCodes(*source.format, source.data, i, 1, &code);
    const MatrixConstants& constants = *source.constants;
    const int64_t b = i / constants.scale_block;
    const double zero = constants.zeros.empty() ? 0 : constants.zeros[b];
    return std::fabs(constants.scales[b]) * (std::fabs(CodebookOf(source)[code]) + std::fabs(zero));
  }
  static double Inline(const MatrixSource& source, int64_t row, int64_t i) {
    const WeightFormat& format = *source.format;
    CodeGroup group;
    format.codes(source.data + row * format.RowBytes(source.k), i / format.group, group);
    return std::fabs(group.scale * group.codes[i % format.group]) + std::fabs(group.offset);
  }

  std::vector<float> values;
  std::vector<double> magnitudes;
};

// One product on a fresh output; rows are `gap` apart.
inline std::vector<float> Multiply(LowBitGpu& gpu, const CudaMatrix& matrix,
                                   const std::vector<float>& x) {
  const MatMulInput input = gpu.Input(x, matrix.k());
  const int64_t rows = input.x.rows;
  std::vector<float> out(static_cast<size_t>(rows * matrix.n()), kNan);
  float* at = gpu.Upload(out);
  const Projection projection = {.weight = &matrix,
                                 .out = DenseTensor(at, DType::kF32, rows, matrix.n())};
  gpu.family().Multiply(input, {&projection, 1});
  EXPECT_TRUE(gpu.device().Synchronize().ok());
  return gpu.Download(at, out.size());
}

// Against double sums of canonical weights and rounded activations. A value of a codebook enters
// rounded to 16 bits (`decoded`: the whole weight does); beyond that every operation of f32 rounds
// once: at most two for each term and one for each addition.
inline void ExpectNear(const MatrixSource& source, const std::vector<float>& x, DType dtype,
                       bool decoded, const std::vector<float>& out) {
  const Weights weights(source);
  const int64_t n = source.n, k = source.k;
  const double rounding =
      source.format->apart() || decoded ? RoundingOf(dtype) : 0.0;  // integers are exact
  const double tiny = dtype == DType::kF16 ? 0x1p-25 : 0;
  const double relative = rounding + static_cast<double>(k + 32) * 0x1p-23;
  for (size_t row = 0; row * k < x.size(); ++row) {
    for (int64_t feature = 0; feature < n; ++feature) {
      double sum = 0, magnitude = 0, total = 0;
      for (int64_t i = 0; i < k; ++i) {
        const double value = Rounded(x[row * k + i], dtype);
        sum += weights.values[feature * k + i] * value;
        magnitude += weights.magnitudes[feature * k + i] * std::fabs(value);
        total += std::fabs(value);
      }
      ASSERT_NEAR(out[row * n + feature], sum, relative * magnitude + tiny * total + 1e-30)
          << source.format->name << " [" << n << ", " << k << "] row " << row << " feature "
          << feature;
    }
  }
}

struct Shape {
  int64_t n;
  int64_t k;
  int64_t block = 0;         // of apart formats
  bool half_scales = false;  // apart formats: scales are exact in f16, as GPTQ's are
};

// Shapes that a format allows: whole and partial bands and steps, blocks that straddle rows.
inline std::vector<Shape> ShapesOf(const WeightFormat& format) {
  if (!format.apart()) return {{16, format.block}, {37, 2 * format.block}};
  return {{16, 64},
          {37, 192, 64, true},
          {33, 192, 128},
          {16, 512, 128},
          {21, 80, 64},
          {20, 96},
          {19, 160, 32},
          {5, 100, 100},
          {5, 100, 64},
          {7, 45, 9},
          {3, 200, int64_t{1} << 40}};
}

inline RandomMatrix MakeMatrix(const WeightFormat& format, const Shape& shape, uint64_t seed) {
  RandomMatrix matrix = MakeRandomMatrix(format, shape.n, shape.k, seed, shape.block);
  if (shape.half_scales) {
    for (float& scale : matrix.constants->scales) scale = ToFloat(ToHalf(scale));
  }
  return matrix;
}

}  // namespace treadle::cuda
