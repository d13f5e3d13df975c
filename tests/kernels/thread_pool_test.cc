#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <immintrin.h>

#include <atomic>
#include <vector>

namespace treadle {
namespace {

class ThreadPoolTest : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, EveryThreadRunsEveryTaskOnce) {
  ThreadPool pool(GetParam());
  std::vector<int64_t> runs(GetParam(), 0);  // plain: Run is the only synchronization
  for (int i = 0; i < 2000; ++i) {
    pool.Run([&](int worker) { ++runs[worker]; });
    for (const int64_t count : runs) ASSERT_EQ(count, i + 1);
  }
}

TEST_P(ThreadPoolTest, BarrierSeparatesPhases) {
  ThreadPool pool(GetParam(), /*pin=*/GetParam() == 2);
  const int n = GetParam();
  std::vector<int> values(n, 0);
  std::atomic<int> wrong = 0;
  for (int i = 0; i < 200; ++i) {
    pool.Run([&](int worker) {
      for (int phase = 0; phase < 5; ++phase) {
        values[worker] = 10 * i + phase;
        pool.Barrier();
        for (const int value : values) wrong += value != 10 * i + phase;
        pool.Barrier();
      }
    });
  }
  EXPECT_EQ(wrong, 0);
}

TEST_P(ThreadPoolTest, ParallelForCoversEveryIndexOnce) {
  ThreadPool pool(GetParam());
  for (const int64_t count : {0, 1, 2, 15, 16, 17, 100}) {
    for (const int64_t grain : {1, 3, 16}) {
      std::vector<int> seen(count, 0);
      pool.ParallelFor(count, grain, [&](int64_t begin, int64_t end) {
        EXPECT_EQ(begin % grain, 0);
        for (int64_t i = begin; i < end; ++i) ++seen[i];
      });
      for (const int times : seen) EXPECT_EQ(times, 1);
    }
  }
}

// The caller's modes are whatever the program left; a task's are the engine's.
TEST_P(ThreadPoolTest, AllThreadsKeepDenormalsAndRoundToNearest) {
  ThreadPool pool(GetParam());
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0xffc0);  // flush, denormals are zero, round toward zero
  std::vector<unsigned> modes(GetParam());
  pool.Run([&](int worker) { modes[worker] = _mm_getcsr() & 0xffc0u; });
  _mm_setcsr(before);
  for (const unsigned mode : modes) EXPECT_EQ(mode, 0x1f80u);
}

// Idle workers sleep: they must wake for the next task all the same.
TEST_P(ThreadPoolTest, WakesAfterSleeping) {
  ThreadPool pool(GetParam());
  std::atomic<int> runs = 0;
  for (int i = 0; i < 5; ++i) {
    pool.Run([&](int) { ++runs; });
    const timespec pause{0, 2'000'000};  // longer than the spin
    nanosleep(&pause, nullptr);
  }
  EXPECT_EQ(runs, 5 * GetParam());
}

// More threads than processors run as well: 2, 3, 16.
INSTANTIATE_TEST_SUITE_P(Sizes, ThreadPoolTest, testing::Values(1, 2, 3, 16));

TEST(ThreadPool, StopsWithoutEverRunning) { ThreadPool pool(4); }

}  // namespace
}  // namespace treadle
