// LLM.int8() on the emulated device: bit for bit what the CPU backend gives, and within the
// formats' roundings of the reference, which sums in double precision. Every row count that takes
// another kernel, and outliers of all kinds. Without warpgroups: row_int8_warpgroups_test.cc.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/kernels/cuda/row_int8/row_int8_products.h"

namespace treadle::cuda {
namespace {

using Products = Int8Products;

// Every variant of the streaming kernel, full and not; odd shapes, tiles that are not full.
TEST(RowInt8Test, FewRowsAreTheCpusBits) {
  Products products({.n = {33, 20}, .k = 197});
  for (const int64_t rows : {1, 2, 4, 5, 8, 9, 16}) {
    products.ExpectBitsOfCpu(Activations(rows, 197));
  }
}

// One row on tiles, and as many as the streaming kernel takes on it.
TEST(RowInt8Test, CrossoversCanBeMoved) {
  for (const int64_t few_rows : {0, 1000}) {
    Int8Products products({.n = {33, 20}, .k = 197}, {}, few_rows);
    for (const int64_t rows : {1, 16, 17}) products.ExpectBitsOfCpu(Activations(rows, 197));
  }
}

// Rings go round several times, and not all warps have the same work.
TEST(RowInt8Test, LongRows) {
  Products products({.n = {19}, .k = 5190});
  for (const int64_t rows : {1, 3, 7, 16, 17}) products.ExpectBitsOfCpu(Activations(rows, 5190));
}

// As many columns as there may be, and sums as far from zero as they get: 128 * 127 * k. One row's
// codes no longer fit beside the ring: it is quantized by a kernel of its own.
TEST(RowInt8Test, TheLargestSums) {
  constexpr int64_t kColumns = kMaxInt8Columns;
  Products products({.n = {3}, .k = kColumns}, {.multiprocessors = 100});
  std::fill_n(products.matrix(0).bytes.begin(), kColumns, std::byte{0x80});
  EXPECT_FALSE(Int8StreamQuantizes(products.device(), 1, kColumns));
  for (const int64_t rows : {1, 17}) {
    HostMatrix x = Activations(rows, kColumns);
    std::fill_n(x.Row(rows - 1), kColumns, 1.0f);
    products.ExpectBitsOfCpu(x);
  }
}

// The order in which warps and lanes run is drawn from the seed.
TEST(RowInt8Test, AnyOrderOfThreads) {
  for (const uint64_t seed : {2, 3, 4, 5}) {
    Products products({.n = {37}, .k = 700}, {.multiprocessors = 100, .seed = seed});
    for (const int64_t rows : {1, 6, 40}) products.ExpectBitsOfCpu(Activations(rows, 700));
  }
}

// On one multiprocessor nothing is split, and every width of tiles has its rows.
TEST(RowInt8Test, ManyRowsAreTheCpusBits) {
  Products products({.n = {37, 130}, .k = 197},
                    {.multiprocessors = 1, .warpgroup_matrices = false});
  for (const auto& [rows, width] :
       {std::pair{17, 32}, {32, 32}, {40, 64}, {65, 128}, {140, 256}, {300, 128}}) {
    const Int8TilesPlan plan = products.Plan(rows);
    EXPECT_EQ(plan.rows, width) << rows;
    EXPECT_EQ(plan.splits, 1) << rows;
    products.ExpectBitsOfCpu(Activations(rows, 197));
  }
}

// The last block of a tile adds up the others' sums, and leaves all as the next product needs it.
TEST(RowInt8Test, SplitTilesAreTheCpusBits) {
  Products products({.n = {37, 130}, .k = 1500},
                    {.multiprocessors = 100, .warpgroup_matrices = false});
  for (const int64_t rows : {17, 40, 65, 300, 17}) {
    EXPECT_GT(products.Plan(rows).splits, 1) << rows;
    products.ExpectBitsOfCpu(Activations(rows, 1500));
  }
}

// Ten large tiles on four multiprocessors: eight have a block each.
TEST(RowInt8Test, SomeTilesAreSplit) {
  Products products({.n = {380, 140}, .k = 1500},
                    {.multiprocessors = 4, .warpgroup_matrices = false});
  EXPECT_EQ(products.Plan(500), (Int8TilesPlan{128, 256, 8, 2}));
  products.ExpectBitsOfCpu(Activations(500, 1500));
}

TEST(RowInt8Test, CloseToTheReference) {
  for (const int64_t rows : {1, 7, 20, 70}) {
    Products({.n = {19}, .k = 130}).ExpectCloseToReference(Activations(rows, 130));
  }
}

TEST(RowInt8Test, SmallShapes) {
  for (const int64_t k : {1, 3, 4, 31, 64, 65, 128}) {
    for (const int64_t n : {1, 16, 17}) {
      Products products({.n = {n}, .k = k, .bias = n != 16, .accumulate = n != 17});
      for (const int64_t rows : {1, 3, 66}) products.ExpectBitsOfCpu(Activations(rows, k));
    }
  }
}

TEST(RowInt8Test, ThresholdsAndRules) {
  for (const OutlierRule rule : {OutlierRule::kPerRow, OutlierRule::kPerCall}) {
    for (const float threshold : {0.0f, 1.5f, 6.0f, 1000.0f}) {
      Products products({.n = {18}, .k = 150, .threshold = threshold, .rule = rule});
      for (const int64_t rows : {1, 6, 40, 70}) products.ExpectBitsOfCpu(Activations(rows, 150));
    }
  }
}

// More columns than a row lists, and than a chunk holds; all of them, and exactly a chunk.
TEST(RowInt8Test, ManyOutliers) {
  for (const int64_t count : {30, 31, 32, 33, 64, 200}) {
    for (const int64_t rows : {1, 3, 67}) {
      HostMatrix x(rows, 200, 3);
      for (int64_t row = 0; row < rows; row += 2) {
        for (int64_t i = 0; i < count; ++i) {
          x.Row(row)[(i * 7 + row % 4) % 200] = i % 2 == 0 ? -9.0f : 7.0f;
        }
      }
      Products({.n = {21}, .k = 200}).ExpectBitsOfCpu(x);
    }
  }
}

TEST(RowInt8Test, OddNumbers) {
  for (const float threshold : {0.0f, 6.0f}) {
    for (const int64_t rows : {1, 9, 65}) {
      HostMatrix x = Activations(rows, 100);
      x.Row(0)[5] = kNan;
      if (rows > 3) {
        x.Row(2)[99] = kInfinity;
        x.Row(3)[0] = -kInfinity;
        x.Row(4)[64] = 0x1p-101f;  // the row's only one, and too small
        std::fill_n(x.Row(5), 100, 0x1p-140f);
        x.Row(6)[1] = 0x1p-100f;
        std::fill_n(x.Row(7), 100, -0.0f);
      }
      Products products({.n = {18}, .k = 100, .threshold = threshold});
      const std::vector<HostMatrix> given = products.OnDevice(x);
      // NaN spoils its row, and no other; so does an infinity.
      EXPECT_TRUE(std::isnan(given[0].Row(0)[0]));
      for (int64_t row = 1; row < rows; ++row) {
        if (row == 2 || row == 3) continue;
        EXPECT_TRUE(std::isfinite(given[0].Row(row)[0])) << row;
      }
      if (threshold > 0) products.ExpectBitsOfCpu(x);
    }
  }
}

// N1, N2.
TEST(RowInt8Test, RowsDoNotDependOnNeighbours) {
  Products products({.n = {35}, .k = 130, .accumulate = false});
  const HostMatrix x = Activations(70, 130);
  const HostMatrix all = products.OnDevice(x)[0];
  for (const auto& [first, count] :
       {std::pair{0, 1}, {3, 1}, {69, 1}, {6, 7}, {12, 33}, {30, 14}, {1, 68}}) {
    HostMatrix part(count, 130, 0);
    std::copy_n(x.Row(first), part.values.size(), part.values.begin());
    const HostMatrix given = products.OnDevice(part)[0];
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t n = 0; n < 35; ++n) {
        EXPECT_EQ(given.Row(row)[n], all.Row(first + row)[n]) << first << " + " << row;
      }
    }
  }
}

TEST(RowInt8Test, ProjectionsOfDifferentKinds) {
  Products products({.n = {16, 5, 17, 33, 7, 9}, .k = 70});
  products.matrix(1).constants->outlier_threshold = 2.0f;
  products.matrix(3).constants->outlier_rule = OutlierRule::kPerCall;
  products.matrix(4).constants->outlier_threshold = 0;
  for (const int64_t rows : {1, 5, 70}) products.ExpectBitsOfCpu(Activations(rows, 70));
}

TEST(RowInt8Test, RowOrder) {
  Products products({.n = {50}, .k = 96});
  RandomMatrix& matrix = products.matrix(0);
  for (int32_t i = 0; i < 50; ++i) matrix.row_order.push_back((i * 7 + 3) % 50);
  matrix.source.row_order = matrix.row_order;
  for (const int64_t rows : {1, 4}) products.ExpectBitsOfCpu(Activations(rows, 96));
}

// In a graph nothing is waited for: the host comes back to the results once.
TEST(RowInt8Test, DeferredWork) {
  Products products({.n = {40}, .k = 96}, {.deferred = true});
  for (const int64_t rows : {1, 9, 80}) products.ExpectBitsOfCpu(Activations(rows, 96));
}

TEST(RowInt8Test, Embed) {
  Products products({.n = {50}, .k = 77});
  const MatrixSource& source = products.matrix(0).source;
  Device& device = products.device();
  const auto table = products.family().Pack(source).value();
  const std::vector<int32_t> ids = {49, 0, -1, 17, -2, -3, 17};
  const std::vector<int32_t> last = {33, 48};
  const std::vector<int32_t> meant = {49, 0, -1, 17, 33, 48, 17};
  const Buffer device_ids = device.Allocate(ids.size() * 4).value();
  const Buffer device_last = device.Allocate(last.size() * 4).value();
  device.CopyToDevice(device_ids.data(), ids.data(), ids.size() * 4);
  device.CopyToDevice(device_last.data(), last.data(), last.size() * 4);
  for (const bool accumulate : {false, true}) {
    HostMatrix out(static_cast<int64_t>(ids.size()), 77, 5);
    HostMatrix expected = out;
    std::vector<float> row(77);
    for (size_t i = 0; i < ids.size(); ++i) {
      std::fill(row.begin(), row.end(), 0.0f);
      if (meant[i] >= 0) DecodeSourceRow(source, meant[i], row.data());
      for (int64_t j = 0; j < 77; ++j) {
        float& value = expected.Row(static_cast<int64_t>(i))[j];
        value = accumulate ? value + row[j] : row[j];
      }
    }
    const Buffer buffer = device.Allocate(out.bytes()).value();
    device.CopyToDevice(buffer.data(), out.values.data(), out.bytes());
    products.family().Embed(*table, {reinterpret_cast<const int32_t*>(device_ids.data()),
                                     reinterpret_cast<const int32_t*>(device_last.data()), 0,
                                     table->n(), accumulate, out.View(buffer.data())});
    device.CopyToHost(out.values.data(), buffer.data(), out.bytes());
    Products::ExpectEqual({out}, {expected});
  }
}

}  // namespace
}  // namespace treadle::cuda
