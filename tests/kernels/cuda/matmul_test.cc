// Products of float weights, on the emulated device: against sums in double precision, against
// themselves at other row counts (N1, N2).
#include "kernels/cuda/matmul.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cuda/dense/dense_kernels.h"
#include "kernels/op_cases/op_cases.h"
#include "tests/kernels/cuda/product_matrices.h"

namespace treadle::cuda {
namespace {

using ::testing::HasSubstr;

struct Shape {
  std::vector<int64_t> n;
  int64_t k;
  bool bias = false;
  bool accumulate = false;
};

class Products {
 public:
  Products(const MatMulOptions& options, const Shape& shape, const EmulationSettings& settings = {})
      : options_(options), shape_(shape), device_(OpenDevice(settings)) {
    matmuls_ = MatMuls::Create(*device_, options).value();
    for (size_t i = 0; i < shape.n.size(); ++i) {
      weights_.emplace_back("f32", shape.n[i], shape.k, 100 + i);
      packed_.push_back(matmuls_->Pack(weights_.back().source).value());
      bias_.push_back(std::make_unique<Matrix>(*device_, 1, shape.n[i], 0, 200 + i));
    }
  }

  // The result of every projection: [rows, n + kGap].
  std::vector<std::vector<float>> Run(Matrix& x) {
    std::vector<std::unique_ptr<Matrix>> out;
    std::vector<Projection> projections;
    for (size_t i = 0; i < shape_.n.size(); ++i) {
      out.push_back(std::make_unique<Matrix>(*device_, x.view.rows, shape_.n[i], kGap, 300 + i));
      projections.push_back({.weight = packed_[i].get(),
                             .bias = shape_.bias ? bias_[i]->view.Row<float>(0) : nullptr,
                             .out = out[i]->view,
                             .accumulate = shape_.accumulate});
    }
    EXPECT_TRUE(matmuls_->Multiply(x.view, projections).ok());
    EXPECT_TRUE(device_->Synchronize().ok());
    std::vector<std::vector<float>> results;
    before_.clear();
    for (const auto& o : out) {
      results.push_back(o->Download());
      before_.push_back(o->host);
    }
    return results;
  }

  // Against double precision. A sum of k products in f32, in any order, is off by at most k
  // roundings of partial sums, each below 2^-23 of the sum of magnitudes (matrix units truncate);
  // two more for bias and residual.
  void Check(Matrix& x) {
    const auto results = Run(x);
    for (size_t i = 0; i < shape_.n.size(); ++i) {
      const int64_t n = shape_.n[i];
      for (int64_t row = 0; row < x.view.rows; ++row) {
        for (int64_t f = 0; f < n; ++f) CheckElement(x, i, row, f, results[i]);
        for (int64_t gap = n; gap < n + kGap; ++gap) {
          ASSERT_TRUE(std::isnan(results[i][row * (n + kGap) + gap])) << "written between rows";
        }
      }
    }
  }

  Device& device() { return *device_; }
  MatMuls& matmuls() { return *matmuls_; }
  const PackedMatrix& packed(size_t i) const { return *packed_[i]; }

 private:
  void CheckElement(Matrix& x, size_t i, int64_t row, int64_t f, const std::vector<float>& out) {
    double sum = 0;
    double magnitude = 0;
    const auto add = [&](double value) {
      sum += value;
      magnitude += std::abs(value);
    };
    for (int64_t j = 0; j < shape_.k; ++j) {
      add(double{Rounded(x.Row(row)[j], options_.dtype)} *
          Rounded(weights_[i].At(f, j), options_.dtype));
    }
    if (shape_.bias) add(bias_[i]->host[f]);
    const size_t at = row * (shape_.n[i] + kGap) + f;
    if (shape_.accumulate) add(before_[i][at]);
    ASSERT_NEAR(out[at], sum, (shape_.k + 2) * 0x1p-23 * magnitude)
        << "projection " << i << ", row " << row << " of " << x.view.rows << ", feature " << f;
  }

  const MatMulOptions options_;
  const Shape shape_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<MatMuls> matmuls_;
  std::vector<Weights> weights_;
  std::vector<std::unique_ptr<PackedMatrix>> packed_;
  std::vector<std::unique_ptr<Matrix>> bias_;
  std::vector<std::vector<float>> before_;  // what Run's outputs held at first
};

// Row counts around every border between kernels and tiles.
constexpr int64_t kRowCounts[] = {1, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 130};

class MatMulTest : public ::testing::TestWithParam<std::tuple<DType, bool>> {
 protected:
  MatMulOptions options() const {
    return {.dtype = std::get<0>(GetParam()), .deterministic = std::get<1>(GetParam())};
  }
};

// Rows [first_a, first_a + rows) of results `a` are those of `b` from first_b on, bit by bit.
void ExpectSameRows(const std::vector<float>& a, int64_t first_a, const std::vector<float>& b,
                    int64_t first_b, int64_t rows, int64_t n) {
  for (int64_t row = 0; row < rows; ++row) {
    ASSERT_EQ(std::memcmp(&a[(first_a + row) * (n + kGap)], &b[(first_b + row) * (n + kGap)],
                          n * sizeof(float)),
              0)
        << "row " << row << " of " << rows;
  }
}

TEST_P(MatMulTest, AgreesWithDoublePrecisionAtEveryRowCount) {
  // Eleven steps of k, the last one partly filled: parts of one and of two steps.
  Products products(options(), {.n = {21}, .k = 650});
  for (const int64_t rows : kRowCounts) {
    Matrix x(products.device(), rows, 650, 2, 7);
    products.Check(x);
  }
}

TEST_P(MatMulTest, BiasResidualAndSeveralProjectionsInOneLaunch) {
  Products products(options(),
                    {.n = {48, 16, 17, 1, 130}, .k = 128, .bias = true, .accumulate = true});
  for (const int64_t rows : {1, 6, 20, 40}) {
    Matrix x(products.device(), rows, 128, 0, 8);
    products.Check(x);
  }
}

TEST_P(MatMulTest, WideTilesOfSeveralProjections) {
  Products products(options(), {.n = {70, 65, 130}, .k = 192, .bias = true, .accumulate = true},
                    {.multiprocessors = 1});
  for (const int64_t rows : {4, 8, 16, 32, 33}) {
    Matrix x(products.device(), rows, 192, 0, 20);
    products.Check(x);
  }
}

TEST_P(MatMulTest, SmallestAndOddShapes) {
  for (const int64_t n : {1, 15, 33}) {
    for (const int64_t k : {1, 7, 63, 65}) {
      Products products(options(), {.n = {n}, .k = k, .bias = n == 15});
      for (const int64_t rows : {1, 35}) {
        Matrix x(products.device(), rows, k, 1, 9);
        products.Check(x);
      }
    }
  }
}

// Whatever is said to be few: right, also where a kernel goes no further.
TEST_P(MatMulTest, AnyCrossoverIsRight) {
  for (const int64_t few_rows : {0, 3, 1000}) {
    MatMulOptions moved = options();
    moved.few_rows = few_rows;
    Products products(moved, {.n = {40, 70}, .k = 100, .bias = true});
    for (const int64_t rows : {1, 4, 33}) {
      Matrix x(products.device(), rows, 100, 0, 12);
      products.Check(x);
    }
  }
}

TEST_P(MatMulTest, ARowsBitsDoNotDependOnItsNeighbours) {
  // Few steps of k leave parts empty; many give every part two. One multiprocessor gets wider
  // tiles.
  for (const int64_t k : {64 * 3, 64 * 11}) {
    const Shape shape = {.n = {40, 70}, .k = k, .bias = true};
    Products products(options(), shape, {.multiprocessors = 132});
    Products wide(options(), shape, {.multiprocessors = 1});
    // Without `deterministic`, the library takes over beyond kDenseStreamRows.
    const int64_t most = options().deterministic ? 130 : kDenseStreamRows;
    Matrix all(products.device(), most, k, 0, 10);
    const auto together = products.Run(all);
    for (const int64_t rows : kRowCounts) {
      if (rows > most) break;
      const int64_t first = most - rows;
      for (Products* alone : {&products, &wide}) {
        Matrix some(alone->device(), rows, k, 0, 10);
        std::copy_n(all.Row(first), rows * k, some.Row(0));
        some.Upload();
        const auto results = alone->Run(some);
        for (size_t i = 0; i < shape.n.size(); ++i) {
          ExpectSameRows(results[i], 0, together[i], first, rows, shape.n[i]);
        }
      }
    }
  }
}

TEST_P(MatMulTest, NanSpoilsItsOwnRowOnly) {
  Products products(options(), {.n = {33}, .k = 100});
  for (const int64_t rows : {2, 12, 40}) {
    Matrix x(products.device(), rows, 100, 0, 11);
    x.Row(1)[99] = kNan;
    x.Upload();
    const std::vector<float> out = products.Run(x)[0];
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t f = 0; f < 33; ++f) {
        ASSERT_EQ(std::isnan(out[row * (33 + kGap) + f]), row == 1) << row << " of " << rows;
      }
    }
  }
}

// A replayed graph reads what its inputs hold then, and nothing in it allocates.
TEST_P(MatMulTest, CanBeCaptured) {
  Products products(options(), {.n = {20, 30}, .k = 192, .bias = true});
  Device& device = products.device();
  ASSERT_TRUE(products.matmuls().Reserve(64, 192, 30).ok());
  for (const int64_t rows : {2, 7, 64}) {
    Matrix x(device, rows, 192, 0, 12);
    Matrix out(device, rows, 20, 0, 13);
    const Projection projection = {.weight = &products.packed(0), .out = out.view};
    device.BeginCapture();
    ASSERT_TRUE(products.matmuls().Multiply(x.view, {&projection, 1}).ok());
    auto graph = device.EndCapture();
    ASSERT_TRUE(graph.ok());
    EXPECT_EQ(std::memcmp(out.Download().data(), out.host.data(), rows * 20 * 4), 0);
    for (const uint64_t seed : {14, 15}) {
      Matrix next(device, rows, 192, 0, seed);
      device.CopyToDevice(x.buffer.data(), next.host.data(), next.host.size() * sizeof(float));
      device.Replay(**graph);
      const std::vector<float> replayed = out.Download();
      const Projection again = {.weight = &products.packed(0), .out = out.view};
      ASSERT_TRUE(products.matmuls().Multiply(next.view, {&again, 1}).ok());
      EXPECT_EQ(replayed, out.Download()) << rows << " rows";
    }
  }
}

TEST_P(MatMulTest, EmbedDecodesRowsOfTheTable) {
  const DType dtype = options().dtype;
  const auto device = OpenDevice();
  const auto matmuls = MatMuls::Create(*device, options()).value();
  const Weights weights("f32", 9, 300, 16);
  const auto table = matmuls->Pack(weights.source).value();
  constexpr int32_t kFirst = 4;  // the table's first id
  const std::vector<int32_t> ids = {12, -1, 4, -2 - 2, -2, 7, 3, 13};
  const std::vector<int32_t> last = {9, 100, 11};
  const std::vector<int32_t> rows = {8, -1, 0, 7, 5, 3, -1, -1};
  const Buffer on_device = device->Allocate((ids.size() + last.size()) * 4).value();
  auto* device_ids = reinterpret_cast<int32_t*>(on_device.data());
  device->CopyToDevice(device_ids, ids.data(), ids.size() * 4);
  device->CopyToDevice(device_ids + ids.size(), last.data(), last.size() * 4);
  for (const bool accumulate : {false, true}) {
    Matrix out(*device, std::ssize(ids), 300, kGap, 17);
    matmuls->Embed(*table,
                   {device_ids, device_ids + ids.size(), kFirst, table->n(), accumulate, out.view});
    const std::vector<float> now = out.Download();
    for (size_t row = 0; row < rows.size(); ++row) {
      for (int64_t i = 0; i < 300; ++i) {
        const float value = rows[row] < 0 ? 0 : Rounded(weights.At(rows[row], i), dtype);
        ASSERT_EQ(now[row * (300 + kGap) + i], accumulate ? out.Row(row)[i] + value : value);
      }
      ASSERT_TRUE(std::isnan(now[row * (300 + kGap) + 300]));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, MatMulTest,
                         ::testing::Combine(::testing::ValuesIn(kTypes), ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(Name(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "_deterministic" : "");
                         });

// Projections of all families in one call have the bits that each has in a call of its own.
// Where the library has no algorithm, own tiles do it; that is slower, and said once.
TEST(MatMuls, AFallbackFromTheLibraryIsSaidOnce) {
  const EmulationSettings settings = {.library_refuses = true};
  const ScopedEmulation emulation(settings);
  Products products({.dtype = DType::kBF16}, {.n = {48, 16}, .k = 128}, settings);
  testing::internal::CaptureStderr();
  for (const int64_t rows : {40, 64}) {
    Matrix x(products.device(), rows, 128, 0, 8);
    products.Check(x);
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("cuBLASLt has no algorithm for a product of 40 rows, 128 inputs and "
                              "48 outputs in bf16"));
  EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
}

TEST(MatMuls, FamiliesShareACall) {
  const auto device = OpenDevice();
  const auto matmuls = MatMuls::Create(*device, {.deterministic = true}).value();
  std::vector<std::unique_ptr<PackedMatrix>> packed;
  for (const std::string_view format : {"bf16", "q4_0", "int8", "q8_0", "f16"}) {
    const WeightFormat* found = FindWeightFormat(format);
    ASSERT_NE(found, nullptr) << format;
    packed.push_back(matmuls->Pack(MakeRandomMatrix(*found, 24, 64, 21).source).value());
  }
  for (const int64_t rows : {2, 12}) {
    Matrix x(*device, rows, 64, 0, 22);
    std::vector<std::unique_ptr<Matrix>> together;
    std::vector<Projection> projections;
    for (const auto& matrix : packed) {
      together.push_back(std::make_unique<Matrix>(*device, rows, 24, kGap, 23));
      projections.push_back({.weight = matrix.get(), .out = together.back()->view});
    }
    ASSERT_TRUE(matmuls->Multiply(x.view, projections).ok());
    for (size_t i = 0; i < packed.size(); ++i) {
      const Matrix alone(*device, rows, 24, kGap, 24);
      const Projection projection = {.weight = packed[i].get(), .out = alone.view};
      ASSERT_TRUE(matmuls->Multiply(x.view, {&projection, 1}).ok());
      ExpectSameRows(alone.Download(), 0, together[i]->Download(), 0, rows, 24);
    }
  }
}

TEST(MatMuls, SaysWhatIsWrong) {
  const auto device = OpenDevice({.memory_bytes = size_t{1} << 20});
  EXPECT_THAT(std::string(MatMuls::Create(*device, {.dtype = DType::kI8}).status().message()),
              HasSubstr("in int8: expected f32, f16 or bf16"));
  const auto matmuls = MatMuls::Create(*device, {}).value();
  Weights weights("f32", 1024, 1024, 19);
  const auto packed = matmuls->Pack(weights.source);
  ASSERT_EQ(packed.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(packed.status().message()), HasSubstr("matrix [1024, 1024] as bf16"));
  const std::vector<int32_t> order = {1024};
  weights.source.row_order = order;
  EXPECT_EQ(matmuls->Pack(weights.source).status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status reserved = matmuls->Reserve(16, 64, 64);
  EXPECT_EQ(reserved.code(), absl::StatusCode::kResourceExhausted) << "cuBLASLt's workspace";
}

}  // namespace
}  // namespace treadle::cuda
