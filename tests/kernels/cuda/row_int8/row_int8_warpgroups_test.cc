// LLM.int8() of many rows on warpgroups of the emulated device: bit for bit what the CPU backend
// and devices without warpgroups give.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/kernels/cuda/row_int8/row_int8_products.h"

namespace treadle::cuda {
namespace {

using Products = Int8Products;

// The product of x, after a look that warpgroups compute it.
void ExpectBitsOfCpu(Products& products, const HostMatrix& x) {
  ASSERT_EQ(products.Plan(x.rows).features, kInt8WarpgroupFeatures) << x.rows;
  products.ExpectBitsOfCpu(x);
}

// Tiles that are full and not, of features and of rows; a tile that spans no second segment, and
// segments that begin with one. On one multiprocessor nothing is split.
TEST(RowInt8WarpgroupsTest, ManyRowsAreTheCpusBits) {
  Products products({.n = {37, 192, 211}, .k = 197}, {.multiprocessors = 1});
  for (const int64_t rows : {130, 255, 256, 257, 300, 523}) {
    EXPECT_EQ(products.Plan(rows).splits, 1);
    ExpectBitsOfCpu(products, Activations(rows, 197));
  }
}

// Every number of units up to where the ring has gone round twice, with and without a whole last
// one; each at another seed.
TEST(RowInt8WarpgroupsTest, UnitsAndOrders) {
  for (int64_t units = 1; units <= 14; ++units) {
    const int64_t k = 64 * units - units % 3;
    Products products({.n = {130 + units}, .k = k},
                      {.multiprocessors = 1, .seed = static_cast<uint64_t>(units)});
    ExpectBitsOfCpu(products, Activations(150, k));
  }
}

// 3 x 2 tiles on 4 multiprocessors: four have a block each, several blocks share each of the
// others. On 18 multiprocessors all are shared. Sums are left as the next product needs them.
TEST(RowInt8WarpgroupsTest, SharedTilesAreTheCpusBits) {
  for (const int multiprocessors : {4, 18}) {
    Products products({.n = {380, 140}, .k = 1500}, {.multiprocessors = multiprocessors});
    for (int i = 0; i < 2; ++i) {
      const Int8TilesPlan plan = products.Plan(500 + i);
      EXPECT_EQ(plan.whole, multiprocessors == 4 ? 4 : 0);
      EXPECT_GT(plan.splits, 1);
      ExpectBitsOfCpu(products, Activations(500 + i, 1500));
    }
  }
}

// Sums that no float has, of either sign.
TEST(RowInt8WarpgroupsTest, LargeSums) {
  constexpr int64_t kColumns = 4090;
  Products products({.n = {140}, .k = kColumns}, {.multiprocessors = 1});
  std::fill_n(products.matrix(0).bytes.begin(), kColumns, std::byte{0x80});
  std::fill_n(products.matrix(0).bytes.begin() + kColumns, kColumns, std::byte{0x7f});
  HostMatrix x = Activations(131, kColumns);
  for (const int64_t row : {0, 130}) std::fill_n(x.Row(row), kColumns, 1.0f);
  ExpectBitsOfCpu(products, x);
}

TEST(RowInt8WarpgroupsTest, BiasAndResidual) {
  for (const bool bias : {false, true}) {
    for (const bool accumulate : {false, true}) {
      Products products({.n = {132}, .k = 70, .bias = bias, .accumulate = accumulate},
                        {.multiprocessors = 1});
      ExpectBitsOfCpu(products, Activations(131, 70));
    }
  }
}

TEST(RowInt8WarpgroupsTest, ThresholdsAndRules) {
  for (const OutlierRule rule : {OutlierRule::kPerRow, OutlierRule::kPerCall}) {
    for (const float threshold : {0.0f, 1.5f, 6.0f, 1000.0f}) {
      Products products({.n = {140}, .k = 150, .threshold = threshold, .rule = rule},
                        {.multiprocessors = 1});
      for (const int64_t rows : {140, 270}) ExpectBitsOfCpu(products, Activations(rows, 150));
    }
  }
}

// More columns than a row lists, and than a chunk holds; exactly a chunk, and all of them. In every
// second row, in each row of its own, and in a tile's last row only.
TEST(RowInt8WarpgroupsTest, ManyOutliers) {
  for (const int64_t count : {31, 32, 33, 200}) {
    HostMatrix x(257, 200, 3);
    for (int64_t row = 0; row < 257; ++row) {
      const bool many = row % 2 == 0 && row < 128;
      for (int64_t i = 0; i < (many ? count : row == 255 ? 1 : 0); ++i) {
        x.Row(row)[(i * 7 + row % 4) % 200] = i % 2 == 0 ? -9.0f : 7.0f;
      }
      if (row > 128 && row < 200) x.Row(row)[row % 32 + 40] = 8.0f;
    }
    Products products({.n = {133}, .k = 200}, {.multiprocessors = 1});
    ExpectBitsOfCpu(products, x);
  }
}

TEST(RowInt8WarpgroupsTest, OddNumbers) {
  HostMatrix x = Activations(260, 100);
  x.Row(0)[5] = kNan;
  x.Row(66)[99] = kInfinity;
  x.Row(131)[0] = -kInfinity;
  x.Row(132)[64] = 0x1p-101f;  // the row's only one, and too small
  std::fill_n(x.Row(200), 100, 0x1p-140f);
  x.Row(201)[1] = 0x1p-100f;
  std::fill_n(x.Row(259), 100, -0.0f);
  for (const bool bias : {false, true}) {
    Products products({.n = {150}, .k = 100, .bias = bias, .accumulate = bias},
                      {.multiprocessors = 1});
    ExpectBitsOfCpu(products, x);
  }
  // No column is an outlier then: NaN spoils its row, and no other.
  Products products({.n = {150}, .k = 100, .threshold = 0}, {.multiprocessors = 1});
  const HostMatrix given = products.OnDevice(x)[0];
  for (int64_t row = 0; row < 260; ++row) {
    const bool spoiled = row == 0 || row == 66 || row == 131;
    EXPECT_EQ(std::isfinite(given.Row(row)[149]), !spoiled) << row;
  }
}

// N1, N2: rows of few, on other kernels, and of many.
TEST(RowInt8WarpgroupsTest, RowsDoNotDependOnNeighbours) {
  Products products({.n = {150}, .k = 130, .accumulate = false}, {.multiprocessors = 1});
  const HostMatrix x = Activations(270, 130);
  ASSERT_EQ(products.Plan(270).features, kInt8WarpgroupFeatures);
  const HostMatrix all = products.OnDevice(x)[0];
  for (const auto& [first, count] :
       {std::pair{0, 1}, {269, 1}, {6, 9}, {12, 33}, {100, 100}, {1, 260}}) {
    HostMatrix part(count, 130, 0);
    std::copy_n(x.Row(first), part.values.size(), part.values.begin());
    const HostMatrix given = products.OnDevice(part)[0];
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t n = 0; n < 150; ++n) {
        ASSERT_EQ(given.Row(row)[n], all.Row(first + row)[n]) << first << " + " << row;
      }
    }
  }
}

// A smaller product in the buffers of a larger one: rows beyond the last are what that left.
TEST(RowInt8WarpgroupsTest, AfterALargerProduct) {
  Products products({.n = {150}, .k = 130}, {.multiprocessors = 1});
  for (const int64_t rows : {300, 258, 140}) ExpectBitsOfCpu(products, Activations(rows, 130));
}

}  // namespace
}  // namespace treadle::cuda
