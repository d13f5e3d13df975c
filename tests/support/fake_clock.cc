#include "tests/support/fake_clock.h"

namespace treadle {

Clock::time_point FakeClock::Now() const {
  return Clock::time_point(Clock::duration(ticks_.load(std::memory_order_relaxed)));
}

void FakeClock::Advance(Clock::duration by) {
  ticks_.fetch_add(by.count(), std::memory_order_relaxed);
}

}  // namespace treadle
