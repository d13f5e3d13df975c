// Products with low-bit matrices on the emulated device: against sums in double precision, and
// against themselves at other row counts (N1, N2).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/low_bit/low_bit_gpu.h"

namespace treadle::cuda {
namespace {

TEST(LowBit, ProductsOfEveryFormat) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const WeightFormat* format : LowBitFormats()) {
      uint64_t seed = 1;
      for (const Shape& shape : ShapesOf(*format)) {
        const RandomMatrix matrix = MakeMatrix(*format, shape, ++seed);
        LowBitGpu gpu(dtype);
        const auto packed = gpu.family().Pack(matrix.source).value();
        for (const int64_t rows : {1, 11}) {
          const std::vector<float> x = RandomRows(rows, shape.k, seed);
          const std::vector<float> out = Multiply(gpu, *packed, x);
          // Matrices that are kept as floats are multiplied by activations as they are.
          const bool floats = static_cast<const LowBitMatrix&>(*packed).view().bits == 32;
          ExpectNear(matrix.source, x, floats ? DType::kF32 : dtype, false, out);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// More steps than a block's warps keep on their way, more bands than blocks.
TEST(LowBit, LongAndTallMatrices) {
  for (const auto& [name, n, k] : {std::tuple("nf4", 40, 4608), std::tuple("q5_k", 16, 4608),
                                   std::tuple("q4_0", 200, 96), std::tuple("q6_k", 110, 256)}) {
    const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(name), n, k, 5);
    LowBitGpu gpu(DType::kBF16, false, {.multiprocessors = 1});
    const auto packed = gpu.family().Pack(matrix.source).value();
    for (const int64_t rows : {2, 9}) {
      const std::vector<float> x = RandomRows(rows, k, 6);
      ExpectNear(matrix.source, x, gpu.dtype(), false, Multiply(gpu, *packed, x));
      if (HasFatalFailure()) return;
    }
  }
}

// As many blocks as run at the same time, whatever a multiprocessor has room for, deal bands out.
TEST(LowBit, FewRowsFillTheDevice) {
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("nf4"), 16 * 16, 128, 5);
  const std::vector<float> x = RandomRows(2, 128, 6);
  std::vector<float> first;
  for (const int resident : {1, 2, 3, 5}) {
    std::vector<LaunchRecord> launches;
    LowBitGpu gpu(DType::kBF16, false,
                  {.multiprocessors = 4, .resident_blocks = resident, .launches = &launches});
    const auto packed = gpu.family().Pack(matrix.source).value();
    const std::vector<float> out = Multiply(gpu, *packed, x);
    ASSERT_FALSE(launches.empty());
    EXPECT_EQ(launches.back().shape.grid_x, std::min(16, 4 * resident));
    if (first.empty()) first = out;
    EXPECT_EQ(out, first) << resident;
  }
}

TEST(LowBit, RowsDoNotDependOnTheirNeighbours) {
  constexpr int64_t kRows = 70;
  for (const auto& [name, k] : {std::tuple("nf4", 1216), std::tuple("q4_k", 768),
                                std::tuple("q6_k", 768), std::tuple("fp8", 700)}) {
    const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(name), 24, k, 7);
    LowBitGpu gpu(DType::kBF16, /*deterministic=*/true);
    const auto packed = gpu.family().Pack(matrix.source).value();
    ASSERT_TRUE(gpu.family().Reserve(4096, 4096, 4096).ok());
    const std::vector<float> x = RandomRows(kRows, k, 8);
    const std::vector<float> whole = Multiply(gpu, *packed, x);
    for (const auto& [first, count] : {std::pair(0, 1), std::pair(69, 1), std::pair(3, 8),
                                       std::pair(30, 9), std::pair(1, 33), std::pair(0, 64)}) {
      const std::vector<float> part = Multiply(
          gpu, *packed, std::vector<float>(x.begin() + first * k, x.begin() + (first + count) * k));
      EXPECT_EQ(std::memcmp(part.data(), whole.data() + first * 24, part.size() * sizeof(float)), 0)
          << name << " rows " << first << " + " << count;
    }
  }
}

// Some of a matrix's bands alone.
TEST(LowBit, SlicesGiveTheSameBits) {
  for (const char* name : {"nf4", "q4_k", "q4_1", "gptq8"}) {
    const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(name), 60, 256, 7);
    LowBitGpu gpu(DType::kBF16);
    const auto packed = gpu.family().Pack(matrix.source).value();
    const std::vector<float> x = RandomRows(5, 256, 8);
    const std::vector<float> whole = Multiply(gpu, *packed, x);
    const LowBitView& view = static_cast<const LowBitMatrix&>(*packed).view();
    for (const auto& [first, count] : {std::pair(0, 16), std::pair(16, 32), std::pair(48, 12)}) {
      float* out = gpu.Upload(std::vector<float>(5 * count, kNan));
      const LowBitProduct part = {.w = SliceFeatures(view, first, count),
                                  .out = DenseTensor(out, DType::kF32, 5, count)};
      LowBitFewRows(gpu.device(), gpu.Input(x, 256), {&part, 1});
      const std::vector<float> found = gpu.Download(out, 5 * count);
      for (int64_t i = 0; i < 5 * count; ++i) {
        ASSERT_EQ(found[i], whole[i / count * 60 + first + i % count]) << name << " " << first;
      }
    }
  }
}

// Columns that are not there never meet a value that is not a number.
TEST(LowBit, PaddingIsFinite) {
  RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("kbit4"), 3, 100, 7, 300);
  matrix.constants->codebook[0] = kNan;
  for (std::byte& codes : matrix.bytes) codes |= std::byte{0x11};
  for (const int64_t rows : {3, 140}) {
    LowBitGpu gpu(DType::kBF16);
    const auto packed = gpu.family().Pack(matrix.source).value();
    ASSERT_EQ(static_cast<const LowBitMatrix&>(*packed).view().bits, 4);
    ASSERT_TRUE(gpu.family().Reserve(256, 100, 3).ok());
    const std::vector<float> x = RandomRows(rows, 100, 8);
    ExpectNear(matrix.source, x, DType::kBF16, rows > 128, Multiply(gpu, *packed, x));
  }
}

TEST(LowBit, ManyRowsGoThroughTheLibrary) {
  for (const auto& [name, n, k] :
       {std::tuple("nf4", 4100, 64), std::tuple("q6_k", 40, 256), std::tuple("gptq4", 40, 80),
        std::tuple("fp8", 40, 100), std::tuple("q5_1", 40, 96)}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(name), n, k, 9);
      LowBitGpu gpu(dtype);
      const auto packed = gpu.family().Pack(matrix.source).value();
      ASSERT_TRUE(gpu.family().Reserve(256, k, n).ok());
      const std::vector<float> x = RandomRows(130, k, 10);
      ExpectNear(matrix.source, x, dtype, true, Multiply(gpu, *packed, x));
      if (HasFatalFailure()) return;
    }
  }
}

// A crossover that was moved: one row through the library, many without it.
TEST(LowBit, CrossoversCanBeMoved) {
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("nf4"), 40, 128, 9);
  for (const int64_t few_rows : {0, 1000}) {
    LowBitGpu gpu(DType::kBF16, false, {.multiprocessors = 2}, few_rows);
    const auto packed = gpu.family().Pack(matrix.source).value();
    ASSERT_TRUE(gpu.family().Reserve(256, 128, 40).ok());
    for (const int64_t rows : {1, 130}) {
      const std::vector<float> x = RandomRows(rows, 128, 10);
      ExpectNear(matrix.source, x, DType::kBF16, few_rows == 0, Multiply(gpu, *packed, x));
      if (HasFatalFailure()) return;
    }
  }
}

// Projections of several layouts and codebooks, with bias, onto what is there.
TEST(LowBit, ProjectionsShareAnInput) {
  constexpr int64_t kCols = 256;
  struct Row {
    std::string_view format;
    int64_t n;
    bool bias;
    bool accumulate;
  };
  const Row rows[] = {{"nf4", 40, true, false},
                      {"kbit4", 24, false, true},
                      {"nf4", 16, true, true},
                      {"q4_k", 20, true, false},
                      {"q8_0", 16, false, false}};
  for (const int64_t count : {3, 140}) {
    LowBitGpu gpu(DType::kBF16, false, {.multiprocessors = 1});
    std::vector<RandomMatrix> sources;
    std::vector<std::unique_ptr<CudaMatrix>> packed;
    std::vector<Projection> projections;
    std::vector<std::vector<float>> biases, before;
    const std::vector<float> x = RandomRows(count, kCols, 1);
    for (const Row& row : rows) {
      const uint64_t seed = packed.size() + 2;
      sources.push_back(MakeRandomMatrix(*FindWeightFormat(row.format), row.n, kCols, seed));
      packed.push_back(gpu.family().Pack(sources.back().source).value());
      biases.push_back(RandomRows(1, row.n, seed));
      before.push_back(RandomRows(count, row.n + 3, seed + 50));
      projections.push_back(
          {.weight = packed.back().get(),
           .bias = row.bias ? gpu.Upload(biases.back()) : nullptr,
           .out = {gpu.Upload(before.back()), DType::kF32, count, row.n, row.n + 3},
           .accumulate = row.accumulate});
    }
    ASSERT_TRUE(gpu.family().Reserve(count, kCols, 64).ok());
    gpu.family().Multiply(gpu.Input(x, kCols), projections);
    ASSERT_TRUE(gpu.device().Synchronize().ok());
    for (size_t p = 0; p < projections.size(); ++p) {
      const Row& row = rows[p];
      const std::vector<float> found =
          gpu.Download(projections[p].out.Row<float>(0), before[p].size());
      std::vector<float> product;
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t j = 0; j < row.n + 3; ++j) {
          const size_t at = i * (row.n + 3) + j;
          if (j >= row.n) {
            ASSERT_EQ(found[at], before[p][at]) << "between rows";
            continue;
          }
          const double added =
              (row.bias ? biases[p][j] : 0.0f) + double{row.accumulate ? before[p][at] : 0.0f};
          product.push_back(static_cast<float>(found[at] - added));
        }
      }
      // The addend is of magnitude 1 to 8, and rounds as often.
      const double slack = 8 * 4 * 0x1p-24;
      const Weights weights(sources[p].source);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t j = 0; j < row.n; ++j) {
          double sum = 0, magnitude = 0;
          for (int64_t c = 0; c < kCols; ++c) {
            const double value = Rounded(x[i * kCols + c], DType::kBF16);
            sum += weights.values[j * kCols + c] * value;
            magnitude += weights.magnitudes[j * kCols + c] * std::fabs(value);
          }
          ASSERT_NEAR(product[i * row.n + j], sum, magnitude * (0x1p-8 + 300 * 0x1p-23) + slack)
              << row.format << " row " << i << " feature " << j;
        }
      }
    }
  }
}

TEST(LowBit, NanSpoilsItsOwnRow) {
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("q4_k"), 16, 256, 3);
  LowBitGpu gpu(DType::kBF16);
  const auto packed = gpu.family().Pack(matrix.source).value();
  std::vector<float> x = RandomRows(9, 256, 4);
  const std::vector<float> clean = Multiply(gpu, *packed, x);
  x[3 * 256 + 70] = kNan;
  const std::vector<float> out = Multiply(gpu, *packed, x);
  for (int64_t i = 0; i < 9 * 16; ++i) {
    if (i / 16 == 3) {
      EXPECT_TRUE(std::isnan(out[i]));
    } else {
      EXPECT_EQ(out[i], clean[i]);
    }
  }
}

}  // namespace
}  // namespace treadle::cuda
