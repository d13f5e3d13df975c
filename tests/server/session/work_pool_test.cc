#include "server/session/work_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "server/observe/refusals.h"

namespace treadle {
namespace {

constexpr auto kTrial = WorkPool::Kind::kTrial;

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
    const absl::Status full = pool.Submit("a", 1001, work);
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(ReasonOf(full), RefusalReason::kUnreadFull);
    EXPECT_TRUE(pool.Submit("a", 600, work).ok());
    EXPECT_EQ(pool.Submit("b", 500, work).code(), absl::StatusCode::kResourceExhausted);
    EXPECT_TRUE(pool.Submit("b", 400, work).ok());
    EXPECT_EQ(pool.bytes(), 1000u);
    EXPECT_TRUE(pool.Submit("a", 0, work).ok());
    EXPECT_TRUE(pool.Submit("a", 0, work).ok());
    counts = pool.counts();
    while (counts->running < 2) std::this_thread::yield();  // one of them takes short work only
    EXPECT_EQ(counts->waiting, 2);
    go.set_value();
  }  // what was taken in is done
  EXPECT_EQ(done, 4);
  EXPECT_EQ(counts->running, 0);
  EXPECT_EQ(counts->waiting, 0);
}

TEST(WorkPool, OneOwnerLeavesRoomForOthers) {
  std::promise<void> go;
  const std::shared_future<void> gone = go.get_future().share();
  const auto work = [gone] { gone.wait(); };
  WorkPool pool({.entries = 8, .bytes = 1000, .short_bytes = 10});
  EXPECT_TRUE(pool.Submit("a", 900, work).ok());  // what is alone may be as large as all
  const absl::Status bytes = pool.Submit("a", 20, work);
  EXPECT_EQ(bytes.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(bytes.message()),
              testing::HasSubstr("at most 6 of 750 wait (three quarters of --max-unread-requests"));
  // Trials count like texts. One of them runs, and six wait.
  for (int i = 0; i < 7; ++i) {
    EXPECT_TRUE(pool.Submit("b", 1, work, kTrial).ok()) << i;
    while (i == 0 && pool.counts()->running < 2) std::this_thread::yield();
  }
  EXPECT_FALSE(pool.Submit("b", 1, work, kTrial).ok());
  EXPECT_FALSE(pool.Submit("b", 1, work).ok());
  EXPECT_TRUE(pool.Submit("c", 1, work).ok());
  go.set_value();
}

TEST(WorkPool, LongWorkDoesNotHoldUpShort) {
  std::promise<void> go, short_done;
  WorkPool pool({.short_bytes = 10});
  const std::shared_future<void> gone = go.get_future().share();
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(pool.Submit("a", 11, [gone] { gone.wait(); }).ok());
  ASSERT_TRUE(pool.Submit("a", 10, [&] { short_done.set_value(); }).ok());
  EXPECT_EQ(short_done.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  go.set_value();
}

TEST(WorkPool, TrialsHoldUpNoText) {
  std::promise<void> go, long_done;
  WorkPool pool({.short_bytes = 10});
  const std::shared_future<void> gone = go.get_future().share();
  for (int i = 0; i < 5; ++i)
    ASSERT_TRUE(pool.Submit(
                        "a", 5, [gone] { gone.wait(); }, kTrial)
                    .ok());
  ASSERT_TRUE(pool.Submit("a", 11, [&] { long_done.set_value(); }).ok());
  EXPECT_EQ(long_done.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  go.set_value();
}

// Fifty of one owner's that wait, then one of another's: it is the next, whatever the kind.
TEST(WorkPool, OwnersTakeTurns) {
  for (const auto kind : {WorkPool::Kind::kText, kTrial}) {
    std::promise<void> go;
    const std::shared_future<void> gone = go.get_future().share();
    std::atomic<int> served = 0, place = 0;
    WorkPool pool({.short_bytes = 10});
    const auto work = [&, gone] {
      gone.wait();
      ++served;
    };
    for (int i = 0; i < 50; ++i) ASSERT_TRUE(pool.Submit("a", 11, work, kind).ok());
    while (pool.counts()->running < 1) std::this_thread::yield();
    ASSERT_TRUE(pool.Submit(
                        "b", 11, [&] { place = ++served; }, kind)
                    .ok());
    go.set_value();
    pool.Stop();
    EXPECT_EQ(place, 2);
    EXPECT_EQ(served, 51);
  }
}

}  // namespace
}  // namespace treadle
