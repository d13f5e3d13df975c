// LLM.int8() put together from cuBLASLt, on the emulated GPU: without outliers it gives the bits of
// our own product.
#include "bench/kernels/library_int8.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bench/kernels/int8_baseline.h"
#include "tests/kernels/cuda/row_int8/row_int8_products.h"

namespace treadle::cuda {
namespace {

using testing::HasSubstr;

// Rows of the kinds that a scale has: ordinary, zero, smaller than counts, with one large element.
HostMatrix Inputs(int64_t rows, int64_t k) {
  HostMatrix x(rows, k, 11);
  for (int64_t row = 0; row < rows; ++row) {
    if (row % 5 == 1) std::fill_n(x.Row(row), k, 0.0f);
    if (row % 5 == 2) std::fill_n(x.Row(row), k, 0x1p-101f);
    if (row % 5 == 3) x.Row(row)[row % k] = -1000.0f;
  }
  return x;
}

Buffer Upload(Device& device, const HostMatrix& matrix) {
  Buffer buffer = device.Allocate(matrix.bytes()).value();
  device.CopyToDevice(buffer.data(), matrix.values.data(), matrix.bytes());
  return buffer;
}

// The product of Int8Products' matrix 0, with its bias and what its output holds before.
HostMatrix ByLibrary(Int8Products& products, const Int8Shape& shape, const HostMatrix& x) {
  Device& device = products.device();
  const int64_t n = shape.n[0];
  const auto library = LibraryInt8::Create(device, x.rows, n, x.cols).value();
  const LibraryInt8Weights first =
      library->Upload(std::span(&products.matrix(0).source, 1)).value();
  const LibraryInt8Weights weights = library->Copy(first).value();
  HostMatrix out(x.rows, n, 300);
  const Buffer input = Upload(device, x);
  const Buffer bias = Upload(device, HostMatrix(1, n, 200));
  const Buffer output = Upload(device, out);
  EXPECT_TRUE(library->Multiply(x.View(input.data()), weights,
                                shape.bias ? reinterpret_cast<const float*>(bias.data()) : nullptr,
                                shape.accumulate, out.View(output.data())));
  EXPECT_TRUE(device.Synchronize().ok());
  device.CopyToHost(out.values.data(), output.data(), out.bytes());
  return out;
}

TEST(LibraryInt8, WithoutOutliersHasTheBitsOfOurOwnProduct) {
  for (const int64_t n : {4, 100, 1028}) {
    for (const int64_t k : {4, 100, 128, 1156}) {
      for (const bool bias : {false, true}) {
        for (const bool accumulate : {false, true}) {
          const Int8Shape shape = {
              .n = {n}, .k = k, .threshold = 0, .bias = bias, .accumulate = accumulate};
          for (const bool deferred : {false, true}) {
            Int8Products products(shape, {.deferred = deferred, .late_uploads = deferred});
            for (const int64_t rows : {1, 3, 17, 41}) {
              SCOPED_TRACE(Str("n ", n, " k ", k, " rows ", rows, " deferred ", deferred));
              const HostMatrix x = Inputs(rows, k);
              Int8Products::ExpectEqual({ByLibrary(products, shape, x)}, products.OnDevice(x));
            }
          }
        }
      }
    }
  }
}

TEST(LibraryInt8, HasTheBitsOfOurOwnProductForManyRows) {
  for (const bool accumulate : {false, true}) {
    const Int8Shape shape = {.n = {132}, .k = 260, .threshold = 0, .accumulate = accumulate};
    Int8Products products(shape);
    for (const int64_t rows : {128, 299, 300}) {
      SCOPED_TRACE(rows);
      const HostMatrix x = Inputs(rows, shape.k);
      Int8Products::ExpectEqual({ByLibrary(products, shape, x)}, products.OnDevice(x));
    }
  }
}

// Sums beyond what a float counts in ones.
TEST(LibraryInt8, RoundsLargeSumsOnce) {
  const Int8Shape shape = {.n = {64}, .k = 2052, .threshold = 0, .bias = false};
  Int8Products products(shape);
  RandomMatrix& matrix = products.matrix(0);
  for (size_t i = 0; i < matrix.bytes.size(); ++i) {
    matrix.bytes[i] = std::byte{static_cast<uint8_t>(127 - i / 3 % 2)};
  }
  HostMatrix x(33, shape.k, 1);
  for (int64_t row = 0; row < x.rows; ++row) std::fill_n(x.Row(row), shape.k, 1.0f);
  Int8Products::ExpectEqual({ByLibrary(products, shape, x)}, products.OnDevice(x));
}

// Matrices of one input, one below the other; and rows in another order.
TEST(LibraryInt8, StacksMatrices) {
  const Int8Shape shape = {
      .n = {12, 36, 20}, .k = 72, .threshold = 0, .bias = false, .accumulate = false};
  Int8Products products(shape);
  std::vector<int32_t> order(20);
  for (int i = 0; i < 20; ++i) order[i] = (7 * i + 3) % 20;
  products.matrix(2).source.row_order = order;
  std::vector<MatrixSource> sources;
  for (size_t i = 0; i < 3; ++i) sources.push_back(products.matrix(i).source);
  const HostMatrix x = Inputs(9, shape.k);
  const std::vector<HostMatrix> own = products.OnDevice(x);

  Device& device = products.device();
  const auto library = LibraryInt8::Create(device, 9, 68, shape.k).value();
  const LibraryInt8Weights weights = library->Upload(sources).value();
  EXPECT_EQ(weights.n, 68);
  HostMatrix out(9, 68, 1);
  const Buffer input = Upload(device, x);
  const Buffer output = Upload(device, out);
  ASSERT_TRUE(
      library->Multiply(x.View(input.data()), weights, nullptr, false, out.View(output.data())));
  device.CopyToHost(out.values.data(), output.data(), out.bytes());
  for (int64_t row = 0; row < 9; ++row) {
    int64_t at = 0;
    for (const HostMatrix& part : own) {
      for (int64_t i = 0; i < part.cols; ++i) {
        ASSERT_EQ(out.Row(row)[at + i], part.Row(row)[i]) << row << " " << at + i;
      }
      at += part.cols;
    }
  }
}

TEST(LibraryInt8, LeavesTheOutputAloneIfTheLibraryDoesNotTakeTheProduct) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{6, 64}, {8, 66}}) {
    const Int8Shape shape = {.n = {n}, .k = k, .threshold = 0};
    Int8Products products(shape);
    Device& device = products.device();
    const auto library = LibraryInt8::Create(device, 2, n, k).value();
    const auto weights = library->Upload(std::span(&products.matrix(0).source, 1)).value();
    const HostMatrix x = Inputs(2, k);
    const HostMatrix before(2, n, 5);
    HostMatrix out = before;
    const Buffer input = Upload(device, x);
    const Buffer output = Upload(device, out);
    EXPECT_FALSE(
        library->Multiply(x.View(input.data()), weights, nullptr, false, out.View(output.data())));
    device.CopyToHost(out.values.data(), output.data(), out.bytes());
    Int8Products::ExpectEqual({out}, {before});
  }
}

// -- what is timed --------------------------------------------------------------------------------

constexpr ColdProducts::Options kCold = {.max_rows = 5, .accumulate = true, .cold_bytes = 3000};

TEST(Int8Baseline, RunsForAnyNumberOfRowsAgainAndAgain) {
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("int8"), 16, 64, 1);
  const auto baseline = Int8Baseline::Create(std::span(&matrix.source, 1), kCold).value();
  for (const int64_t rows : {5, 1, 5}) {
    // The emulation has no clock.
    EXPECT_EQ(baseline->Run(rows).value(), 0) << rows;
  }
}

// 16 x 64 codes and 16 scales three times are more than 3000 bytes. A product is two launches
// besides the library's: one with the first copy, then two rounds over all.
TEST(Int8Baseline, RotatesOverCopies) {
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("int8"), 16, 64, 1);
  const auto run = [&](int64_t launches) {
    const ScopedEmulation counted({.fail_after_launches = launches});
    return Int8Baseline::Create(std::span(&matrix.source, 1), kCold).value()->Run(2).status();
  };
  EXPECT_TRUE(run(2 + 2 * 3 * 2).ok());
  EXPECT_FALSE(run(2 + 2 * 3 * 2 - 1).ok());
}

TEST(Int8Baseline, SaysWhatTheLibraryDoesNotTake) {
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("int8"), 6, 64, 1);
  const auto baseline = Int8Baseline::Create(std::span(&matrix.source, 1), kCold).value();
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(std::string(baseline->Run(5).status().message()),
                HasSubstr("no algorithm for 5 rows of int8 times [6, 64]"));
  }
}

TEST(Int8Baseline, SaysThatThereIsNoMemory) {
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("int8"), 16, 64, 1);
  const ScopedEmulation small({.memory_bytes = CublasLt::kWorkspaceBytes + 10000});
  const auto sources = std::span(&matrix.source, 1);
  EXPECT_TRUE(Int8Baseline::Create(sources, kCold).ok());
  ColdProducts::Options large = kCold;
  large.cold_bytes = 20000;
  EXPECT_EQ(Int8Baseline::Create(sources, large).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(ColdProducts, OutliersAreADozenColumns) {
  for (const int64_t k : {4, 64, 4096}) {
    const std::vector<float> x = ColdProducts::Activations(3, k);
    for (int64_t row = 0; row < 3; ++row) {
      int outliers = 0;
      for (int64_t i = 0; i < k; ++i) {
        const bool outlier = std::abs(x[row * k + i]) >= 6.0f;
        outliers += outlier;
        EXPECT_EQ(outlier, std::abs(x[i]) >= 6.0f) << "column " << i << " of row " << row;
      }
      EXPECT_EQ(outliers, std::min<int64_t>(k, 12)) << "of " << k;
    }
  }
}

}  // namespace
}  // namespace treadle::cuda
