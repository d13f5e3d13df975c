#include "base/nearest.h"

#include <gtest/gtest.h>

namespace treadle {
namespace {

TEST(NearestName, IsTheOneWithTheFewestOtherLetters) {
  constexpr std::string_view kNames[] = {"max-queue", "max-context", "max-batch-size",
                                         "max-batch-tokens", "n"};
  EXPECT_EQ(NearestName("max-queu", kNames), "max-queue");
  EXPECT_EQ(NearestName("max_batch_size", kNames), "max-batch-size");
  EXPECT_EQ(NearestName("maxbatchtoken", kNames), "max-batch-tokens");
  EXPECT_EQ(NearestName("max-queue", kNames), "max-queue");
  for (const char* const other : {"", "k", "fly", "temperature", "max"}) {
    EXPECT_EQ(NearestName(other, kNames), "") << other;
  }
  // "kitten" becomes "sitting" in three steps (Wikipedia, "Levenshtein distance"): too many.
  constexpr std::string_view kSitting[] = {"sitting"};
  EXPECT_EQ(NearestName("kitten", kSitting), "");
  EXPECT_EQ(NearestName("kitting", kSitting), "sitting");
  EXPECT_EQ(DidYouMean("kitting", kSitting), "; did you mean 'sitting'?");
  EXPECT_EQ(DidYouMean("kitten", kSitting), "");
  EXPECT_EQ(DidYouMean("sitting", kSitting), "");
  EXPECT_EQ(NearestName(std::string(1 << 20, 'x'), kNames), "");
}

}  // namespace
}  // namespace treadle
