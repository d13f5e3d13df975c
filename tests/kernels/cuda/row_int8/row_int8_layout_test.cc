// LLM.int8() on the emulated device: where bytes lie, which kernel takes a product, and what is
// refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/matmul_family.h"
#include "kernels/cuda/row_int8/row_int8_kernels.h"
#include "kernels/op_cases/op_cases.h"
#include "tests/emulation/emulated_device.h"

namespace treadle::cuda {
namespace {

using ::testing::HasSubstr;

// Purpose of the plan: the products of an 8B model's layer on 132 multiprocessors.
TEST(RowInt8LayoutTest, Plans) {
  const auto plan = [](int64_t rows, int64_t n, int64_t k, bool warpgroups) {
    const int64_t wide = (n + kInt8WarpgroupFeatures - 1) / kInt8WarpgroupFeatures;
    return ChooseInt8Tiles({.rows = rows,
                            .feature_tiles = n / kInt8BlockFeatures,
                            .warpgroup_tiles = warpgroups ? wide : 0,
                            .units = Int8Units(k)},
                           132);
  };
  for (const auto& [n, k] : {std::pair{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}}) {
    EXPECT_EQ(plan(2048, n, k, true).features, kInt8WarpgroupFeatures) << n;
    EXPECT_EQ(plan(2048, n, k, false).rows, 256) << n;  // fewest bytes in shared memory
    for (const bool warpgroups : {false, true}) {
      const Int8TilesPlan few = plan(32, n, k, warpgroups);
      EXPECT_LE(few.rows, 64) << n;
      EXPECT_EQ(few.features, kInt8BlockFeatures) << n;
    }
  }
  EXPECT_EQ(plan(32, 4096, 4096, true), (Int8TilesPlan{128, 32, 0, 4}));
  EXPECT_EQ(plan(64, 4096, 14336, true), (Int8TilesPlan{128, 64, 0, 4}));
  // 22 x 8 tiles: 132 of them fill the machine, and three blocks each share the others.
  EXPECT_EQ(plan(2048, 4096, 14336, true), (Int8TilesPlan{192, 256, 132, 3}));
}

// Sums fit into what is allocated for them, and every tile has a place to arrive at.
TEST(RowInt8LayoutTest, PlansFitTheirMemory) {
  for (const int multiprocessors : {1, 4, 108, 132}) {
    for (int64_t rows = 17; rows < 5000; rows += rows / 8) {
      for (const int64_t tiles : {1, 3, 8, 32, 100, 1002}) {
        const Int8TilesShape shape = {.rows = rows,
                                      .feature_tiles = tiles,
                                      .warpgroup_tiles = rows % 2 * (tiles + 1) * 2 / 3,
                                      .units = 64};
        const Int8TilesPlan chosen = ChooseInt8Tiles(shape, multiprocessors);
        const int64_t shared = Int8Tiles(shape, chosen) - chosen.whole;
        EXPECT_EQ(shared > 0, chosen.splits > 1);
        EXPECT_LE(shared, Int8Arrivals(multiprocessors));
        EXPECT_LE(static_cast<size_t>(shared * chosen.splits * chosen.rows * chosen.features) * 4,
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
  PackInt8Groups(matrix.source, 0, 2, packed.data());
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

// Rows' bytes, written out: four pieces of 8 rows x 16 columns in a unit, as warpgroups read them.
TEST(RowInt8LayoutTest, RowLayout) {
  constexpr int64_t kUnits = 3;
  int64_t at = 0;
  for (int64_t tile = 0; tile < 2; ++tile) {
    for (int64_t unit = 0; unit < kUnits; ++unit) {
      for (int64_t piece = 0; piece < 4; ++piece) {
        for (int64_t row = 0; row < 8; ++row) {
          for (int64_t i = 0; i < 16; ++i, ++at) {
            EXPECT_EQ(Int8RowByte(8 * tile + row, 64 * unit + 16 * piece + i, kUnits), at);
          }
        }
      }
    }
  }
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
