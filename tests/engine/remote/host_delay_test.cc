#include "engine/remote/host_delay.h"

#include <gtest/gtest.h>

namespace treadle {
namespace {

using std::chrono::milliseconds;

TEST(HostDelay, GrowsAtOnceAndIsForgottenSlowly) {
  HostDelay delay;
  auto now = HostDelay::Clock::time_point(std::chrono::hours(1));
  const auto wake = [&](milliseconds late) {
    const auto found = delay.Wake(now, now + milliseconds(250));
    now += milliseconds(250) + late;
    return found;
  };
  EXPECT_EQ(wake(milliseconds(100)), milliseconds(0)) << "the first has nothing to be late for";
  EXPECT_EQ(wake(milliseconds(-200)), milliseconds(100));
  EXPECT_EQ(delay.slack(), HostDelay::kWaits * milliseconds(100));
  EXPECT_EQ(wake(milliseconds(0)), milliseconds(0)) << "woken before it was due";
  EXPECT_GT(delay.slack(), milliseconds(0));
  for (int i = 0; i < 100; ++i) wake(milliseconds(0));
  EXPECT_LT(delay.slack(), milliseconds(1));
  // A process that was stopped.
  wake(milliseconds(5000));
  EXPECT_EQ(wake(milliseconds(0)), milliseconds(5000));
}

}  // namespace
}  // namespace treadle
