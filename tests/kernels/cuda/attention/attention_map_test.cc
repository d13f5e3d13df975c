// The index maps of attention: where splits of a context end, and which tile a row is in.
#include "kernels/cuda/attention/attention_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/kernels/cuda/attention/kv_batch.h"

namespace treadle::cuda {
namespace {

TEST(AttentionMap, SplitsAreFixedAndFew) {
  int32_t before = SplitLength(0);
  EXPECT_EQ(before, kMinSplitPositions);
  for (int32_t p = 0; p < 100'000; ++p) {
    const int32_t length = SplitLength(p);
    ASSERT_EQ(length % kBlockPositions, 0) << p;
    ASSERT_EQ(length & (length - 1), 0) << p;
    ASSERT_GE(length, before) << p;
    ASSERT_LE(SplitsOf(p), kMaxSplits) << p;
    ASSERT_TRUE(length == kMinSplitPositions || p / (length / 2) >= kMaxSplits) << p;
    ASSERT_LE(SplitsOf(p), MaxSplitsBelow(p + 1)) << p;
    before = length;
  }
  EXPECT_LE(SplitsOf(2'000'000'000), kMaxSplits);
}

TEST(AttentionMap, EveryRowIsInOneTile) {
  Random random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const auto tile_rows = static_cast<int32_t>(1 + random.Below(64));
    std::vector<DeviceSequence> sequences;
    int32_t row = 0;
    const int64_t count = 1 + random.Below(40);
    for (int64_t s = 0; s < count; ++s) {
      row += random.Below(3) == 0 ? static_cast<int32_t>(random.Below(70)) : 0;  // rows of nobody
      const auto rows = static_cast<int32_t>(random.Below(2) == 0 ? 1 : 1 + random.Below(200));
      sequences.push_back({row, rows, static_cast<int32_t>(random.Below(100)), 7});
      row += rows;
    }
    sequences.resize(sequences.size() + static_cast<size_t>(random.Below(4)));  // padding
    const auto n = static_cast<int32_t>(sequences.size());
    const int32_t rows = row + static_cast<int32_t>(random.Below(9));
    std::vector<int> seen(static_cast<size_t>(rows), 0);
    for (int32_t number = 0; number < TileBound(rows, n, tile_rows); ++number) {
      const AttentionTile tile = FindTile(sequences.data(), n, tile_rows, number);
      ASSERT_LE(tile.rows, tile_rows);
      if (tile.rows == 0) continue;
      const DeviceSequence& s = sequences[static_cast<size_t>(tile.sequence)];
      ASSERT_EQ(tile.first_position - s.first_position, tile.first_row - s.first_row);
      ASSERT_GE(tile.first_row, s.first_row);
      ASSERT_LE(tile.first_row + tile.rows, s.first_row + s.num_rows);
      ASSERT_EQ(tile.decoding, s.num_rows == 1);
      for (int32_t i = 0; i < tile.rows; ++i) ++seen[static_cast<size_t>(tile.first_row + i)];
    }
    std::vector<int> expected(seen.size(), 0);
    for (const DeviceSequence& s : sequences) {
      std::fill_n(expected.begin() + s.first_row, s.num_rows, 1);
    }
    ASSERT_EQ(seen, expected) << "trial " << trial;
  }
}

}  // namespace
}  // namespace treadle::cuda
