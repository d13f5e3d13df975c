#include "engine/remote/iteration_limit.h"

#include <gtest/gtest.h>

namespace treadle {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(IterationLimit, IsFiveTimesWhatIterationsTakeAndNeverUnderTwoSeconds) {
  IterationLimit limit(seconds(120));
  for (size_t i = 0; i + 1 < IterationLimit::kLeast; ++i) limit.Note(milliseconds(10), 1);
  EXPECT_EQ(limit.For(1), seconds(120)) << "too little is known";
  limit.Note(milliseconds(10), 1);
  EXPECT_EQ(limit.For(1), seconds(2));
  // A chunk may take as much longer as it has more tokens.
  EXPECT_EQ(limit.For(64), milliseconds(3200));
  EXPECT_EQ(limit.For(1 << 20), seconds(120));

  // One in a hundred is an outlier, and what is long ago is forgotten.
  for (size_t i = 0; i < IterationLimit::kSamples; ++i) {
    limit.Note(i % 128 == 0 ? seconds(30) : seconds(1), 8);
  }
  EXPECT_EQ(limit.For(8), seconds(5));
  EXPECT_EQ(limit.For(1), seconds(5));
  limit.Forget();
  EXPECT_EQ(limit.For(1), seconds(120));
}

}  // namespace
}  // namespace treadle
