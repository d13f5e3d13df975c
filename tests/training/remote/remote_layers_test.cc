// How workers share the layers of a model.
#include "training/remote/remote_layers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace treadle {
namespace {

using ::testing::HasSubstr;
using Ranges = std::vector<std::pair<int64_t, int64_t>>;

Ranges Divided(const Ranges& have, int64_t layers) {
  std::vector<LayerRange> ranges;
  for (const auto& [begin, end] : have) ranges.push_back({begin, end});
  const auto divided = DivideLayers(ranges, layers);
  EXPECT_TRUE(divided.ok()) << divided.status();
  Ranges all;
  for (const LayerRange& range : divided.value_or(std::vector<LayerRange>{})) {
    all.push_back({range.begin, range.end});
  }
  return all;
}

TEST(DivideLayers, SharesWhatNobodyHas) {
  const std::pair<int64_t, int64_t> none{0, 0};
  EXPECT_EQ(Divided({none}, 7), (Ranges{{0, 7}}));
  EXPECT_EQ(Divided({none, none}, 7), (Ranges{{0, 3}, {3, 7}}));
  EXPECT_EQ(Divided({{0, 5}, {5, 7}}, 7), (Ranges{{0, 5}, {5, 7}}));
  EXPECT_EQ(Divided({none, {4, 5}, none}, 7), (Ranges{{0, 4}, {4, 5}, {5, 7}}));
  EXPECT_EQ(Divided({{0, 2}, none, none, {6, 7}}, 7), (Ranges{{0, 2}, {2, 4}, {4, 6}, {6, 7}}));
}

TEST(DivideLayers, RefusesGapsAndOverlaps) {
  const auto refusal = [](std::vector<LayerRange> have) {
    const auto divided = DivideLayers(have, 7);
    EXPECT_EQ(divided.status().code(), absl::StatusCode::kFailedPrecondition);
    return std::string(divided.status().message());
  };
  EXPECT_THAT(refusal({{0, 5}}), HasSubstr("they end with layer 5 of 7"));
  EXPECT_THAT(refusal({{2, 7}}), HasSubstr("layers 0 to 2 of 7 are for 0 workers"));
  EXPECT_THAT(refusal({{0, 5}, {4, 7}}), HasSubstr("do not fit together"));
  EXPECT_THAT(refusal({{3, 7}, {0, 3}}), HasSubstr("do not fit together"));
  EXPECT_THAT(refusal({{0, 7}, {0, 0}}), HasSubstr("do not fit together"));
  EXPECT_THAT(refusal({{0, 1}, {0, 0}, {1, 7}}), HasSubstr("layers 1 to 1 of 7 are for 1 workers"));
}

}  // namespace
}  // namespace treadle
