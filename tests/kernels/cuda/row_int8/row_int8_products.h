// Products of LLM.int8() on an emulated device, on the CPU backend and on the reference, for tests.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/matmul_family.h"
#include "kernels/cuda/row_int8/row_int8_kernels.h"
#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"
#include "kernels/reference/reference_backend.h"
#include "tests/emulation/emulated_device.h"

namespace treadle::cuda {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr int64_t kGap = 3;  // elements between rows of x and out; NaN, and never written

struct Int8Shape {
  std::vector<int64_t> n;
  int64_t k = 0;
  float threshold = 6.0f;
  OutlierRule rule = OutlierRule::kPerRow;
  bool bias = true;
  bool accumulate = true;
};

// A [rows, cols] matrix on the host; rows lie kGap apart.
struct HostMatrix {
  HostMatrix(int64_t rows, int64_t cols, uint64_t seed) : rows(rows), cols(cols) {
    Random random(seed);
    values.assign(static_cast<size_t>(rows * stride()), kNan);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < cols; ++i) Row(row)[i] = random.Normal();
    }
  }
  int64_t stride() const { return cols + kGap; }
  float* Row(int64_t row) { return values.data() + row * stride(); }
  const float* Row(int64_t row) const { return values.data() + row * stride(); }
  Tensor View(void* data) const { return {data, DType::kF32, rows, cols, stride()}; }
  size_t bytes() const { return values.size() * sizeof(float); }

  int64_t rows;
  int64_t cols;
  std::vector<float> values;
};

// In threes: the first row has outliers, the second is zero, and the last comes close to one.
inline HostMatrix Activations(int64_t rows, int64_t k, uint64_t seed = 7) {
  HostMatrix x(rows, k, seed);
  Random random(seed);
  const int64_t feature = random.Below(k);
  for (int64_t row = 0; row < rows; ++row) {
    if (row % 3 == 1) std::fill_n(x.Row(row), k, 0.0f);
    if (row % 3 == 2) x.Row(row)[feature] = std::nextafter(6.0f, 0.0f);
    if (row % 3 != 0) continue;
    x.Row(row)[feature] = row % 2 == 0 ? 6.0f : -60.0f;
    for (int64_t i = 0; i < 1 + k / 64; ++i) x.Row(row)[random.Below(k)] = 25.0f;
  }
  return x;
}

// The same products on the device, on the CPU backend and on the reference.
class Int8Products {
 public:
  explicit Int8Products(const Int8Shape& shape, const EmulationSettings& settings = {},
                        std::optional<int64_t> few_rows = {})
      : shape_(shape),
        cpu_(*CreateCpuBackend({.threads = 1})),
        reference_(CreateReferenceBackend()) {
    ScopedEmulation emulation(settings);
    device_ = Device::Open(0).value();
    family_ = MakeRowInt8Family(*device_, {.threads = 2, .few_rows = few_rows});
    for (size_t i = 0; i < shape.n.size(); ++i) {
      matrices_.push_back(
          MakeRandomMatrix(*FindWeightFormat("int8"), shape.n[i], shape.k, 100 + i));
      matrices_.back().constants->outlier_threshold = shape.threshold;
      matrices_.back().constants->outlier_rule = shape.rule;
    }
  }

  RandomMatrix& matrix(size_t i) { return matrices_[i]; }
  Device& device() { return *device_; }
  MatMulFamily& family() { return *family_; }
  // A plan for more than kInt8StreamRows rows.
  Int8TilesPlan Plan(int64_t rows) const {
    const DeviceProperties& machine = device_->properties();
    Int8TilesShape tiles = {.rows = rows, .units = Int8Units(shape_.k)};
    for (const int64_t n : shape_.n) {
      tiles.feature_tiles += (n + kInt8BlockFeatures - 1) / kInt8BlockFeatures;
      if (!machine.warpgroup_matrices) continue;
      tiles.warpgroup_tiles += (n + kInt8WarpgroupFeatures - 1) / kInt8WarpgroupFeatures;
    }
    return ChooseInt8Tiles(tiles, machine.multiprocessors);
  }

  // [rows, n] of each projection, with its gaps.
  std::vector<HostMatrix> OnDevice(const HostMatrix& x) {
    Pack();
    EXPECT_TRUE(family_->Reserve(x.rows, x.cols, 1).ok());
    const Buffer input = Upload(x);
    std::vector<HostMatrix> out = Outs(x.rows);
    std::vector<Buffer> outs, biases;
    std::vector<Projection> projections;
    for (size_t i = 0; i < out.size(); ++i) {
      const HostMatrix bias(1, shape_.n[i], 200 + i);
      outs.push_back(Upload(out[i]));
      biases.push_back(Upload(bias));
      projections.push_back({.weight = packed_[i].get(),
                             .bias = shape_.bias ? Floats(biases.back()) : nullptr,
                             .out = out[i].View(outs.back().data()),
                             .accumulate = shape_.accumulate});
    }
    family_->Multiply({.x = x.View(input.data())}, projections);
    EXPECT_TRUE(device_->Synchronize().ok());
    for (size_t i = 0; i < out.size(); ++i) {
      device_->CopyToHost(out[i].values.data(), outs[i].data(), out[i].bytes());
    }
    return out;
  }

  std::vector<HostMatrix> OnHost(Backend& backend, const HostMatrix& x) {
    HostMatrix input = x;
    std::vector<HostMatrix> out = Outs(x.rows);
    std::vector<std::unique_ptr<PackedMatrix>> packed;
    std::vector<HostMatrix> biases;
    for (size_t i = 0; i < out.size(); ++i) {
      packed.push_back(backend.Pack(matrices_[i].source).value());
      biases.emplace_back(1, shape_.n[i], 200 + i);
    }
    std::vector<Projection> projections;
    for (size_t i = 0; i < out.size(); ++i) {
      projections.push_back({.weight = packed[i].get(),
                             .bias = shape_.bias ? biases[i].Row(0) : nullptr,
                             .out = out[i].View(out[i].values.data()),
                             .accumulate = shape_.accumulate});
    }
    backend.MatMul(input.View(input.values.data()), projections);
    return out;
  }

  void ExpectBitsOfCpu(const HostMatrix& x) { ExpectEqual(OnDevice(x), OnHost(*cpu_, x)); }

  // The reference rounds its weights to float; here the integer sum, the product of the scales and
  // their product, each outlier's product, bias and residual are rounded. A rounded activation is
  // at most twice the given one.
  void ExpectCloseToReference(const HostMatrix& x) {
    const std::vector<HostMatrix> given = OnDevice(x);
    const std::vector<HostMatrix> expected = OnHost(*reference_, x);
    const std::vector<HostMatrix> before = Outs(x.rows);
    std::vector<float> weights(static_cast<size_t>(shape_.k));
    for (size_t i = 0; i < given.size(); ++i) {
      const HostMatrix bias(1, shape_.n[i], 200 + i);
      for (int64_t n = 0; n < shape_.n[i]; ++n) {
        DecodeSourceRow(matrices_[i].source, n, weights.data());
        for (int64_t row = 0; row < x.rows; ++row) {
          double sum = std::fabs(bias.Row(0)[n]) + std::fabs(before[i].Row(row)[n]);
          int outliers = 0;
          for (int64_t k = 0; k < shape_.k; ++k) {
            sum += std::fabs(double{weights[k]} * x.Row(row)[k]);
            outliers += std::fabs(x.Row(row)[k]) >= shape_.threshold;
          }
          const double tolerance = 0x1p-24 * (12 + outliers) * sum;
          EXPECT_NEAR(given[i].Row(row)[n], expected[i].Row(row)[n], tolerance)
              << "projection " << i << " row " << row << " of " << x.rows << " feature " << n;
        }
      }
    }
  }

  // Bits; one NaN is as good as another.
  static void ExpectEqual(const std::vector<HostMatrix>& given,
                          const std::vector<HostMatrix>& expected) {
    ASSERT_EQ(given.size(), expected.size());
    for (size_t i = 0; i < given.size(); ++i) {
      for (size_t j = 0; j < given[i].values.size(); ++j) {
        const float a = given[i].values[j];
        const float b = expected[i].values[j];
        if (std::isnan(a) && std::isnan(b)) continue;
        ASSERT_EQ(std::bit_cast<uint32_t>(a), std::bit_cast<uint32_t>(b))
            << "projection " << i << " of " << given[i].rows << " rows: row "
            << j / given[i].stride() << " column " << j % given[i].stride() << " is " << a
            << ", expected " << b;
      }
    }
  }

 private:
  static const float* Floats(const Buffer& buffer) {
    return reinterpret_cast<const float*>(buffer.data());
  }
  Buffer Upload(const HostMatrix& matrix) {
    Buffer buffer = device_->Allocate(matrix.bytes()).value();
    device_->CopyToDevice(buffer.data(), matrix.values.data(), matrix.bytes());
    return buffer;
  }
  std::vector<HostMatrix> Outs(int64_t rows) const {
    std::vector<HostMatrix> out;
    for (size_t i = 0; i < shape_.n.size(); ++i) out.emplace_back(rows, shape_.n[i], 300 + i);
    return out;
  }
  void Pack() {
    if (!packed_.empty()) return;
    for (const RandomMatrix& matrix : matrices_) {
      packed_.push_back(family_->Pack(matrix.source).value());
    }
  }

  const Int8Shape shape_;
  std::unique_ptr<Backend> cpu_;
  std::unique_ptr<Backend> reference_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<MatMulFamily> family_;
  std::vector<RandomMatrix> matrices_;
  std::vector<std::unique_ptr<CudaMatrix>> packed_;
};

}  // namespace treadle::cuda
