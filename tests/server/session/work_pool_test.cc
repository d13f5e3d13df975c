#include "server/session/work_pool.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

namespace treadle {
namespace {

TEST(WorkPool, RefusesWhatDoesNotFit) {
  std::promise<void> go;
  const std::shared_future<void> gone = go.get_future().share();
  std::atomic<int> done = 0;
  std::shared_ptr<const WorkPool::Counts> counts;
  {
    WorkPool pool({.entries = 4, .bytes = 1000, .short_bytes = 10});
    const auto work = [&] {
      gone.wait();
      ++done;
    };
    EXPECT_EQ(pool.Submit(1001, work).code(), absl::StatusCode::kResourceExhausted);
    EXPECT_TRUE(pool.Submit(600, work).ok());
    EXPECT_EQ(pool.Submit(500, work).code(), absl::StatusCode::kResourceExhausted);
    EXPECT_TRUE(pool.Submit(400, work).ok());
    EXPECT_EQ(pool.bytes(), 1000u);
    EXPECT_TRUE(pool.Submit(0, work).ok());
    EXPECT_TRUE(pool.Submit(0, work).ok());
    counts = pool.counts();
    while (counts->running < 2) std::this_thread::yield();  // one of them takes short work only
    EXPECT_EQ(counts->waiting, 2);
    EXPECT_EQ(counts->refused, 2);
    go.set_value();
  }  // what was taken in is done
  EXPECT_EQ(done, 4);
  EXPECT_EQ(counts->running, 0);
  EXPECT_EQ(counts->waiting, 0);
}

TEST(WorkPool, LongWorkDoesNotHoldUpShort) {
  std::promise<void> go, short_done;
  WorkPool pool({.short_bytes = 10});
  const std::shared_future<void> gone = go.get_future().share();
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(pool.Submit(11, [gone] { gone.wait(); }).ok());
  ASSERT_TRUE(pool.Submit(10, [&] { short_done.set_value(); }).ok());
  EXPECT_EQ(short_done.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  go.set_value();
}

}  // namespace
}  // namespace treadle
