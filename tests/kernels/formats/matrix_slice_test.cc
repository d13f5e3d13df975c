// Parts of matrices in every format: the same values, bit for bit.
#include "kernels/formats/matrix_slice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "base/status.h"
#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

using testing::HasSubstr;

std::vector<uint32_t> RowBits(const MatrixSource& source, int64_t row, int64_t begin, int64_t end) {
  std::vector<float> values(static_cast<size_t>(source.k));
  DecodeSourceRow(source, source.SourceRow(row), values.data());
  std::vector<uint32_t> bits;
  for (int64_t i = begin; i < end; ++i) bits.push_back(std::bit_cast<uint32_t>(values[i]));
  return bits;
}

void ExpectSlice(const MatrixSource& source, std::span<const int32_t> rows, int64_t begin,
                 int64_t end) {
  const auto slice = SliceMatrix(source, rows, begin, end);
  ASSERT_TRUE(slice.ok()) << slice.status();
  const MatrixSource part = slice->source();
  ASSERT_EQ(CheckMatrixSource(part), absl::OkStatus());
  const bool as_floats = !InputOrderOf(source).empty() && end - begin < source.k;
  EXPECT_EQ(part.format, as_floats ? FindWeightFormat("f32") : source.format);
  ASSERT_EQ(part.n, rows.empty() ? source.n : std::ssize(rows));
  ASSERT_EQ(part.k, end - begin);
  for (int64_t row = 0; row < part.n; ++row) {
    ASSERT_EQ(RowBits(part, row, 0, part.k),
              RowBits(source, rows.empty() ? row : rows[row], begin, end))
        << "row " << row << ", columns " << begin << " to " << end;
  }
}

// The first unit of columns and the third, joined: in floats, where codes lie apart.
void ExpectJoined(const MatrixSource& source, int64_t unit) {
  if (source.k < 3 * unit) return;
  std::vector<MatrixSlice> slices;
  for (const int64_t begin : {int64_t{0}, 2 * unit}) {
    auto slice = SliceMatrix(source, {}, begin, begin + unit);
    ASSERT_TRUE(slice.ok()) << slice.status();
    slices.push_back(*std::move(slice));
  }
  const bool as_floats = slices[0].format->apart();
  const MatrixSlice joined = JoinColumns(std::move(slices));
  ASSERT_EQ(CheckMatrixSource(joined.source()), absl::OkStatus());
  EXPECT_EQ(joined.format->apart(), false);
  if (!as_floats && InputOrderOf(source).empty()) EXPECT_EQ(joined.format, source.format);
  for (int64_t row = 0; row < source.n; ++row) {
    std::vector<uint32_t> wanted = RowBits(source, row, 0, unit);
    std::ranges::copy(RowBits(source, row, 2 * unit, 3 * unit), std::back_inserter(wanted));
    ASSERT_EQ(RowBits(joined.source(), row, 0, 2 * unit), wanted) << "row " << row;
  }
}

// All cuts of a few matrices of a format: columns at every unit, rows at random.
void ExpectAllSlices(const MatrixSource& source, Random& random) {
  const int64_t unit = ColumnUnit(*source.format);
  const int64_t step = unit * std::max<int64_t>(1, source.k / unit / 6);
  for (int64_t begin = 0; begin < source.k; begin += step) {
    for (int64_t end = begin + unit; end <= source.k; end += step) {
      std::vector<int32_t> rows;
      for (int64_t row = 0; row < source.n; ++row) {
        if (random.Below(3) > 0) rows.push_back(static_cast<int32_t>(row));
      }
      std::ranges::reverse(rows);
      ExpectSlice(source, rows, begin, end);
    }
  }
  ExpectSlice(source, {}, 0, source.k);
  ExpectJoined(source, unit);
}

TEST(MatrixSlice, KeepsTheValuesOfEveryFormat) {
  Random random(1);
  for (const WeightFormat& format : WeightFormats()) {
    SCOPED_TRACE(format.name);
    const bool row_scales = format.activations == ActivationPolicy::kRowInt8;
    for (const int64_t k : {4 * format.block, 3 * format.block}) {
      const int64_t columns = format.block == 1 ? 24 * k : k;  // 96 and 72
      // Blocks within rows, over rows, of rows, and of all.
      for (const int64_t block : {int64_t{0}, int64_t{24}, int64_t{32}, int64_t{64}, columns,
                                  3 * columns, 11 * columns}) {
        if (block != 0 && (!format.apart() || (row_scales && block != columns))) continue;
        SCOPED_TRACE(Str(columns, " columns, blocks of ", block));
        RandomMatrix matrix = MakeRandomMatrix(format, 11, columns, 5, block);
        ExpectAllSlices(matrix.source, random);
        matrix.row_order.resize(11);
        std::iota(matrix.row_order.begin(), matrix.row_order.end(), 0);
        std::ranges::rotate(matrix.row_order, matrix.row_order.begin() + 4);
        matrix.source.row_order = matrix.row_order;
        ExpectAllSlices(matrix.source, random);
      }
    }
  }
}

TEST(MatrixSlice, TurnsTransposedMatrices) {
  Random random(2);
  for (const char* name : {"f32", "f16", "bf16"}) {
    RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(name), 13, 40, 6);
    matrix.source.transposed = true;
    ExpectAllSlices(matrix.source, random);
    matrix.row_order.resize(13);
    std::iota(matrix.row_order.rbegin(), matrix.row_order.rend(), 0);
    matrix.source.row_order = matrix.row_order;
    ExpectAllSlices(matrix.source, random);
  }
}

// Odd sizes: rows that end within bytes, zero points, a matrix that ends within a byte.
TEST(MatrixSlice, CodesCrossBytes) {
  for (const char* name : {"nf4", "kbit3", "kbit5", "kbit7", "gptq4"}) {
    SCOPED_TRACE(name);
    RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(name), 11, 45, 7, 9);
    for (size_t i = 0; i < matrix.constants->scales.size(); ++i) {
      matrix.constants->zeros.resize(matrix.constants->scales.size());
      matrix.constants->zeros[i] = static_cast<float>(i % 7);
    }
    for (int64_t begin = 0; begin < 45; ++begin) {
      for (int64_t end = begin + 1; end <= 45; end += 3) ExpectSlice(matrix.source, {}, begin, end);
    }
  }
}

TEST(MatrixSlice, InputOrdersStayOrBecomeFloats) {
  Random random(3);
  for (const char* name : {"gptq4", "gptq8", "kbit3"}) {
    SCOPED_TRACE(name);
    RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(name), 9, 96, 10, 32);
    std::vector<int32_t>& order = matrix.constants->input_order;
    order.resize(96);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::reverse(order);
    std::swap(order[3], order[70]);
    ExpectAllSlices(matrix.source, random);
    const int32_t rows[] = {4, 0, 7};
    EXPECT_EQ(SliceMatrix(matrix.source, rows, 0, 96)->constants.input_order, order);
  }
}

TEST(MatrixSlice, KeepsOneScalePerRowForInt8) {
  RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("int8"), 5, 96, 8);
  matrix.constants->outlier_threshold = 3.5f;
  matrix.constants->outlier_rule = OutlierRule::kPerCall;
  const auto slice = SliceMatrix(matrix.source, {}, 31, 77);
  ASSERT_TRUE(slice.ok()) << slice.status();
  EXPECT_EQ(slice->constants.scales, matrix.constants->scales);
  EXPECT_EQ(slice->constants.scale_block, 46);
  EXPECT_EQ(slice->constants.outlier_threshold, 3.5f);
  EXPECT_EQ(slice->constants.outlier_rule, OutlierRule::kPerCall);
}

TEST(MatrixSlice, BlocksAreSmallerOnlyWhereTheCutIsWithinOne) {
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("nf4"), 4, 192, 9, 64);
  const auto block_of = [&](int64_t begin, int64_t end) {
    const auto slice = SliceMatrix(matrix.source, {}, begin, end);
    return slice.ok() ? slice->constants.scale_block : -1;
  };
  EXPECT_EQ(block_of(64, 192), 64);
  EXPECT_EQ(block_of(0, 96), 32);
  EXPECT_EQ(block_of(96, 192), 32);
  EXPECT_EQ(block_of(48, 64), 16);
}

TEST(MatrixSlice, NamesTheBlockThatACutWouldSplit) {
  for (const WeightFormat& format : WeightFormats()) {
    if (format.block == 1) continue;
    const RandomMatrix matrix = MakeRandomMatrix(format, 2, 4 * format.block, 1);
    const absl::Status status =
        SliceMatrix(matrix.source, {}, format.block / 2, 2 * format.block).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(Str(format.name, ", expected whole blocks of ", format.block)));
  }
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("f32"), 2, 8, 1);
  const int32_t beyond[] = {0, 2};
  for (const absl::Status& status : {SliceMatrix(matrix.source, {}, 0, 9).status(),
                                     SliceMatrix(matrix.source, {}, 4, 4).status(),
                                     SliceMatrix(matrix.source, {}, -1, 4).status(),
                                     SliceMatrix(matrix.source, beyond, 0, 4).status()}) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  }
}

}  // namespace
}  // namespace treadle
