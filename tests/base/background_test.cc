#include "base/background.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <optional>
#include <vector>

namespace treadle {
namespace {

TEST(TaskThread, EndsWhenAllTasksHaveRunInOrder) {
  std::vector<int> ran;
  {
    TaskThread thread;
    for (int i = 0; i < 100; ++i) thread.Post([&ran, i] { ran.push_back(i); });
  }
  ASSERT_EQ(ran.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(ran[static_cast<size_t>(i)], i);
}

TEST(PulseThread, CallsAtOnceAndAtTheTimeThatTheLastCallReturned) {
  std::vector<PulseThread::TimePoint> due, called;
  std::promise<void> third;
  {
    PulseThread pulse([&] {
      called.push_back(std::chrono::steady_clock::now());
      due.push_back(called.back() + std::chrono::milliseconds(5));
      if (called.size() < 3) return due.back();
      third.set_value();
      return PulseThread::kNever;
    });
    third.get_future().wait();
  }
  ASSERT_EQ(called.size(), 3u);
  EXPECT_GE(called[1], due[0]);
  EXPECT_GE(called[2], due[1]);
}

TEST(PulseThread, ANudgeIsFollowedByACallEvenAtTheEnd) {
  std::atomic<int> calls = 0;
  std::promise<void> entered, leave;
  {
    PulseThread pulse([&] {
      if (++calls == 1) {
        entered.set_value();
        leave.get_future().wait();
      }
      return PulseThread::kNever;
    });
    entered.get_future().wait();
    for (int i = 0; i < 3; ++i) pulse.Nudge();  // all during the first call
    leave.set_value();
  }
  EXPECT_EQ(calls, 2);
}

TEST(PulseThread, ACallMayNudge) {
  std::atomic<int> calls = 0;
  std::optional<PulseThread> pulse;
  std::promise<void> ready;
  pulse.emplace([&, made = ready.get_future().share()] {
    made.wait();
    if (++calls < 4) pulse->Nudge();
    return PulseThread::kNever;
  });
  ready.set_value();
  while (calls < 4) std::this_thread::yield();
  pulse.reset();
  EXPECT_EQ(calls, 4);
}

}  // namespace
}  // namespace treadle
