// LLM.int8() on the emulated device: where bytes lie, which kernel takes a product, and what is
// refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/emulation/emulated_device.h"
#include "kernels/cuda/row_int8.h"
#include "tests/support/op_cases.h"

namespace treadle::cuda {
namespace {

using ::testing::HasSubstr;

// What the plan is for: the products of an 8B model's layer on 132 multiprocessors.
TEST(RowInt8LayoutTest, Plans) {
  const auto plan = [](int64_t rows, int64_t n, int64_t k) {
    return ChooseInt8Tiles(rows, n / kInt8BlockFeatures, Int8Units(k), 132);
  };
  for (const auto& [n, k] : {std::pair{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}}) {
    EXPECT_EQ(plan(2048, n, k), (Int8TilesPlan{256, 1})) << n;  // fewest bytes in shared memory
    EXPECT_LE(plan(32, n, k).rows, 64) << n;
  }
  EXPECT_EQ(plan(32, 4096, 4096), (Int8TilesPlan{32, 4}));
  EXPECT_EQ(plan(64, 4096, 14336), (Int8TilesPlan{64, 4}));
  // Sums fit into what is allocated for them, and every tile has a place to arrive at.
  for (const int multiprocessors : {1, 4, 108, 132}) {
    for (int64_t rows = 17; rows < 5000; rows += rows / 8) {
      for (const int64_t tiles : {1, 3, 8, 32, 100, 1002}) {
        const Int8TilesPlan chosen = ChooseInt8Tiles(rows, tiles, 64, multiprocessors);
        if (chosen.splits == 1) continue;
        const int64_t blocks = (rows + chosen.rows - 1) / chosen.rows * tiles;
        EXPECT_LE(blocks, Int8Arrivals(multiprocessors));
        EXPECT_LE(
            static_cast<size_t>(blocks * chosen.splits * chosen.rows) * kInt8BlockFeatures * 4,
            Int8SumBytes(multiprocessors));
      }
    }
  }
}

// Each code where the instructions' fragments (simt.h) want it, zeros elsewhere.
TEST(RowInt8LayoutTest, PackedLayout) {
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("int8"), 37, 150, 1);
  const int64_t units = Int8Units(150);
  ASSERT_EQ(units, 3);
  std::vector<uint8_t> packed(static_cast<size_t>(2 * units * kInt8WeightUnitBytes), 99);
  PackInt8Groups(matrix.source, 0, 2, 2, packed.data());
  size_t at = 0;
  for (int64_t unit = 0; unit < 2 * units; ++unit) {
    for (int64_t tile = 0; tile < 2; ++tile) {
      for (int64_t step = 0; step < 2; ++step) {
        for (int64_t i = 0; i < 512; ++i, ++at) {  // lane, a[0] .. a[3], byte
          const int64_t lane = i / 16;
          const int64_t row = lane / 4 + i / 4 % 2 * 8;  // of A
          const int64_t feature = unit / units * 32 + row % 8 * 4 + tile * 2 + row / 8;
          const int64_t column =
              unit % units * 64 + step * 32 + lane % 4 * 4 + i / 8 % 2 * 16 + i % 4;
          uint8_t expected = 0;
          if (feature < 37 && column < 150) {
            expected = static_cast<uint8_t>(matrix.source.data[feature * 150 + column]);
            EXPECT_EQ(Int8WeightByte(feature, column, units), static_cast<int64_t>(at));
          }
          ASSERT_EQ(packed[at], expected) << "unit " << unit << " byte " << i;
        }
      }
    }
  }
}

// Rows' bytes: two instructions' B side by side, every byte once.
TEST(RowInt8LayoutTest, RowLayout) {
  constexpr int64_t kUnits = 2;
  std::vector<int> used(static_cast<size_t>(2 * kUnits * kInt8RowUnitBytes));
  for (int64_t row = 0; row < 16; ++row) {
    for (int64_t column = 0; column < kUnits * kInt8Unit; ++column) {
      const int64_t at = Int8RowByte(row, column, kUnits);
      ++used[static_cast<size_t>(at)];
      EXPECT_EQ(at / kInt8RowUnitBytes, row / 8 * kUnits + column / 64);
      const int64_t in_unit = at % kInt8RowUnitBytes;
      EXPECT_EQ(in_unit / 64, row % 8);              // g
      EXPECT_EQ(in_unit / 16 % 4, column % 16 / 4);  // t
      EXPECT_EQ(in_unit / 8 % 2, column % 64 / 32);  // which instruction
      EXPECT_EQ(in_unit / 4 % 2, column % 32 / 16);  // b[0], b[1]
      EXPECT_EQ(in_unit % 4, column % 4);
    }
  }
  for (const int count : used) EXPECT_EQ(count, 1);
}

TEST(RowInt8LayoutTest, RefusesWhatItCannotPack) {
  const auto roomy = Device::Open(0).value();
  const auto roomy_family = MakeRowInt8Family(*roomy, {});
  RandomMatrix wide = MakeRandomMatrix(*FindWeightFormat("int8"), 1, kMaxInt8Columns + 1, 1);
  EXPECT_THAT(roomy_family->Pack(wide.source).status().message(),
              HasSubstr("expected at most 131072"));
  RandomMatrix bare = MakeRandomMatrix(*FindWeightFormat("int8"), 1, 8, 1);
  bare.source.constants = nullptr;
  EXPECT_THAT(roomy_family->Pack(bare.source).status().message(), HasSubstr("no constants"));
  EXPECT_FALSE(roomy_family->Takes({.format = FindWeightFormat("q8_0")}));
  EXPECT_TRUE(roomy_family->Takes(bare.source));

  ScopedEmulation emulation({.memory_bytes = size_t{1} << 20});
  const auto device = Device::Open(0).value();
  const auto family = MakeRowInt8Family(*device, {});
  const RandomMatrix large = MakeRandomMatrix(*FindWeightFormat("int8"), 2048, 1024, 1);
  const absl::Status status = family->Pack(large.source).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("matrix [2048, 1024] in int8"));
}

}  // namespace
}  // namespace treadle::cuda
