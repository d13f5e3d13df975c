// Placement against all the ways there are.

#include "engine/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/op_cases/random.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

// Whole microseconds, so that sums in any order are equal.
PlacementCosts RandomCosts(Random& random, int64_t layers) {
  const auto part = [&random](int64_t most) {
    return PlacementCosts::Part{static_cast<double>(random.Below(most)),
                                static_cast<uint64_t>(100 + random.Below(100))};
  };
  PlacementCosts costs;
  costs.embedding = part(5);
  for (int64_t i = 0; i < layers; ++i) costs.layers.push_back(part(10));
  costs.head = part(40);
  costs.kv_bytes_per_token = random.Below(3);
  costs.activation_bytes = random.Below(50);
  costs.link_bytes = random.Below(50);
  return costs;
}

struct Best {
  double slowest = std::numeric_limits<double>::infinity();
  double squares = 0;
};

// All ways to cut, one after the other.
Best BruteForce(const PlacementCosts& costs, int stages, const PlacementMemory& memory) {
  const auto layers = static_cast<int64_t>(costs.layers.size());
  Best best;
  const std::function<void(int, int64_t, double, double)> cut =
      [&](int stage, int64_t begin, double slowest, double squares) {
        if (stage == stages) {
          if (begin != layers) return;
          if (slowest < best.slowest || (slowest == best.slowest && squares < best.squares)) {
            best = {slowest, squares};
          }
          return;
        }
        double seconds = begin == 0 ? costs.embedding.seconds : 0;
        uint64_t bytes = begin == 0 ? costs.embedding.weight_bytes : 0;
        bytes += costs.activation_bytes + (stages > 1 ? costs.link_bytes : 0);
        for (int64_t end = begin + 1; end <= layers; ++end) {
          seconds += costs.layers[end - 1].seconds;
          bytes += costs.layers[end - 1].weight_bytes;
          const bool last = end == layers;
          const double all_seconds = seconds + (last ? costs.head.seconds : 0);
          const uint64_t all_bytes =
              bytes + (last ? costs.head.weight_bytes : 0) +
              costs.kv_bytes_per_token * static_cast<uint64_t>((end - begin) * memory.page_size);
          if (memory.device_bytes > 0 && all_bytes > memory.device_bytes) continue;
          cut(stage + 1, end, std::max(slowest, all_seconds), squares + all_seconds * all_seconds);
        }
      };
  cut(0, 0, 0, 0);
  return best;
}

TEST(Placement, IsTheBestOfAllCuts) {
  Random random(1);
  int refused = 0;
  for (int round = 0; round < 400; ++round) {
    const int64_t layers = 1 + random.Below(9);
    const PlacementCosts costs = RandomCosts(random, layers);
    const int stages = static_cast<int>(1 + random.Below(layers));
    PlacementMemory memory;
    if (round % 2 == 1) memory.device_bytes = 200 + random.Below(1500);
    const Best best = BruteForce(costs, stages, memory);
    const auto placed = PlaceLayers(costs, stages, memory);
    if (best.slowest == std::numeric_limits<double>::infinity()) {
      EXPECT_TRUE(absl::IsResourceExhausted(placed.status())) << placed.status();
      ++refused;
      continue;
    }
    ASSERT_TRUE(placed.ok()) << placed.status();
    ASSERT_EQ(placed->size(), static_cast<size_t>(stages));
    double slowest = 0, squares = 0;
    int64_t begin = 0;
    uint64_t bytes = costs.embedding.weight_bytes + costs.head.weight_bytes;
    for (const PlacementCosts::Part& layer : costs.layers) bytes += layer.weight_bytes;
    for (const PlacedStage& stage : *placed) {
      EXPECT_EQ(stage.layers.begin, begin);
      EXPECT_GT(stage.layers.end, begin);
      begin = stage.layers.end;
      slowest = std::max(slowest, stage.seconds);
      squares += stage.seconds * stage.seconds;
      bytes -= stage.weight_bytes;
      if (memory.device_bytes > 0) {
        EXPECT_LE(stage.weight_bytes + stage.other_bytes, memory.device_bytes);
        if (stage.kv_bytes_per_token > 0) {
          EXPECT_GE(stage.KvTokens(memory), memory.page_size);
        }
      }
    }
    EXPECT_EQ(begin, layers);
    EXPECT_EQ(bytes, 0u);
    EXPECT_EQ(slowest, best.slowest);
    EXPECT_EQ(squares, best.squares);
  }
  EXPECT_GT(refused, 20);
  EXPECT_LT(refused, 180);
}

PlacementCosts Uniform(int64_t layers, double head) {
  PlacementCosts costs;
  costs.layers.assign(layers, {1.0, 1000});
  costs.head = {head, 5000};
  costs.kv_bytes_per_token = 2;
  return costs;
}

std::vector<int64_t> Counts(const std::vector<PlacedStage>& stages) {
  std::vector<int64_t> counts;
  for (const PlacedStage& stage : stages) {
    counts.push_back(stage.layers.end - stage.layers.begin);
  }
  return counts;
}

TEST(Placement, AHeadCountsAsTheLayersItCosts) {
  const auto two = PlaceLayers(Uniform(30, 8), 2);
  EXPECT_EQ(Counts(*two), (std::vector<int64_t>{19, 11}));
  EXPECT_EQ(Balance(*two), 1.0);
  EXPECT_EQ(Counts(*PlaceLayers(Uniform(30, 0), 3)), (std::vector<int64_t>{10, 10, 10}));
  // The head alone is the slowest; the rest is spread all the same.
  EXPECT_EQ(Counts(*PlaceLayers(Uniform(7, 20), 4)), (std::vector<int64_t>{2, 2, 2, 1}));
}

TEST(Placement, RefusalsNameWhatWouldDo) {
  for (const int stages : {-1, 0, 31}) {
    const absl::Status status = PlaceLayers(Uniform(30, 8), stages).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_NE(status.message().find("expected 1 to 30"), std::string::npos) << status;
    EXPECT_NE(status.message().find(stages == 31 ? "can be is 30" : "can be is 1"),
              std::string::npos)
        << status;
  }
  // Head and one layer: 6000 bytes, and 64 for a page. 30 layers in stages of at most five.
  const PlacementMemory memory{.device_bytes = 6064};
  const absl::Status status = PlaceLayers(Uniform(30, 8), 2, memory).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_NE(status.message().find("; 7 stages would do"), std::string::npos) << status;
  EXPECT_FALSE(PlaceLayers(Uniform(30, 8), 6, memory).ok());
  EXPECT_TRUE(PlaceLayers(Uniform(30, 8), 7, memory).ok());
  const absl::Status never = PlaceLayers(Uniform(30, 8), 2, {.device_bytes = 6063}).status();
  EXPECT_NE(never.message().find("one needs 6064 bytes"), std::string::npos) << never;
}

TEST(Placement, WhatIsLeftIsForTheCache) {
  const PlacementMemory memory{.device_bytes = 24'000, .page_size = 32};
  ASSERT_OK_AND_ASSIGN(const auto stages, PlaceLayers(Uniform(30, 8), 2, memory));
  const PlacedStage& first = stages[0];
  EXPECT_EQ(first.KvBytes(memory), 24'000u - 19'000u);
  EXPECT_EQ(first.kv_bytes_per_token, 38u);
  EXPECT_EQ(first.KvTokens(memory), 5000 / 38 / 32 * 32);
}

TEST(Placement, NoStageBeginsBehindLayersThatOthersRead) {
  PlacementCosts costs;
  costs.layers.assign(10, {.seconds = 1, .weight_bytes = 100});
  costs.last_begin = 2;
  for (int stages = 1; stages <= 3; ++stages) {
    ASSERT_OK_AND_ASSIGN(const auto placed, PlaceLayers(costs, stages, {}));
    EXPECT_LE(placed.back().layers.begin, 2);
    EXPECT_EQ(placed.back().layers.end, 10);
  }
  const absl::Status status = PlaceLayers(costs, 4, {}).status();
  EXPECT_NE(status.message().find("expected 1 to 3, since"), std::string::npos) << status;
  EXPECT_NE(status.message().find("some read K/V of earlier ones"), std::string::npos) << status;
}

}  // namespace
}  // namespace treadle
