#include "server/observe/token_gaps.h"

#include <gtest/gtest.h>

namespace treadle {
namespace {

constexpr int kLongEnough = 3000;  // records

TEST(TokenGaps, GapsAreOfTokensAfterThePrompt) {
  TokenGaps gaps;
  gaps.BeginRecord();
  EXPECT_EQ(gaps.Observe({.request = 7, .tokens = 64, .initiation = true}, 1.0), std::nullopt);
  gaps.BeginRecord();
  EXPECT_EQ(gaps.Observe({.request = 7, .tokens = 10, .initiation = true}, 2.0), std::nullopt);
  gaps.BeginRecord();
  EXPECT_EQ(gaps.Observe({.request = 7, .tokens = 1}, 2.5), 0.5);
  EXPECT_EQ(gaps.Observe({.request = 8, .tokens = 1}, 2.5), std::nullopt);
}

// A plan that was under way when a request ended names it once more.
TEST(TokenGaps, RequestsNamedAfterTheirEndAreForgotten) {
  TokenGaps gaps;
  for (RequestId request = 1; request <= kLongEnough; ++request) {
    gaps.BeginRecord();
    EXPECT_EQ(gaps.Observe({.request = request, .tokens = 1}, 1.0), std::nullopt);
    gaps.End(request);
    gaps.BeginRecord();
    EXPECT_EQ(gaps.Observe({.request = request, .tokens = 1}, 1.1), std::nullopt);
  }
  EXPECT_LT(gaps.requests(), static_cast<size_t>(kLongEnough));
}

TEST(TokenGaps, ARunningRequestIsNotForgotten) {
  TokenGaps gaps;
  for (int record = 0; record < kLongEnough; ++record) {
    gaps.BeginRecord();
    const std::optional<double> gap = gaps.Observe({.request = 1, .tokens = 1}, record);
    EXPECT_EQ(gap.has_value(), record > 0);
  }
}

}  // namespace
}  // namespace treadle
