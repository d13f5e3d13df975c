// A clock that stands until a test moves it. Thread safety: any thread.
#pragma once

#include <atomic>
#include <chrono>

#include "scheduler/serving_loop.h"

namespace treadle {

class FakeClock final : public TimeSource {
 public:
  // It begins well after the clock's epoch, which means "unset" in a request.
  FakeClock() : ticks_(std::chrono::nanoseconds(std::chrono::hours(1)).count()) {}

  Clock::time_point Now() const override;
  // Wakes nobody: a test that runs the loop's thread also calls RequestPool::Wake.
  void Advance(Clock::duration by);

 private:
  std::atomic<Clock::duration::rep> ticks_;
};

}  // namespace treadle
