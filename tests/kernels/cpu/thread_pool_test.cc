#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "tests/support/in_time.h"

namespace treadle {
namespace {

class ThreadPoolTest : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, EveryPieceRunsOnce) {
  ThreadPool pool(GetParam());
  std::vector<int64_t> runs(37, 0);  // plain: the pool is the only synchronization
  for (int64_t i = 0; i < 2000; ++i) {
    pool.ParallelForEach(std::ssize(runs), [&](int64_t begin, int64_t end) {
      ASSERT_EQ(end, begin + 1);
      ++runs[begin];
    });
    for (const int64_t count : runs) ASSERT_EQ(count, i + 1);
  }
}

// All threads see in a task what the one before it wrote.
TEST_P(ThreadPoolTest, TasksFollowEachOther) {
  ThreadPool pool(GetParam(), /*pin=*/GetParam() == 2);
  std::vector<int> values(64, 0);
  std::atomic<int> wrong = 0;
  for (int task = 0; task < 1000; ++task) {
    pool.ParallelFor(64, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[i] = task;
    });
    pool.ParallelFor(64, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) wrong += values[63 - i] != task;
    });
  }
  EXPECT_EQ(wrong, 0);
}

TEST_P(ThreadPoolTest, TheSecondOfTwoBodiesSeesAllOfTheFirst) {
  ThreadPool pool(GetParam());
  std::vector<int> values(13, 0);
  std::atomic<int> wrong = 0, seconds = 0;
  for (int task = 1; task <= 1000; ++task) {
    pool.ParallelForEach(
        std::ssize(values), [&](int, int64_t i) { values[i] = task; }, 7,
        [&](int worker, int64_t) {
          wrong += worker >= GetParam() || std::ranges::count(values, task) != std::ssize(values);
          ++seconds;
        });
    ASSERT_EQ(seconds, 7 * task);
  }
  EXPECT_EQ(wrong, 0);
}

// The number is the thread's, so that it can name the thread's scratch.
TEST_P(ThreadPoolTest, AWorkerNumberIsOneThreads) {
  ThreadPool pool(GetParam());
  std::vector<std::thread::id> threads(GetParam());
  for (int task = 0; task < 100; ++task) {
    pool.ParallelForEach(50, [&](int worker, int64_t, int64_t) {
      ASSERT_GE(worker, 0);
      ASSERT_LT(worker, GetParam());
      std::thread::id& thread = threads[worker];
      if (thread == std::thread::id()) thread = std::this_thread::get_id();
      ASSERT_EQ(thread, std::this_thread::get_id());
    });
  }
  EXPECT_EQ(threads[0], std::this_thread::get_id());
}

TEST_P(ThreadPoolTest, ParallelForCoversEveryIndexOnce) {
  ThreadPool pool(GetParam());
  for (const int64_t count : {0, 1, 2, 15, 16, 17, 100}) {
    for (const int64_t grain : {1, 3, 16}) {
      std::vector<int> seen(count, 0);
      std::atomic<int> ranges = 0;
      pool.ParallelFor(count, grain, [&](int64_t begin, int64_t end) {
        EXPECT_EQ(begin % grain, 0);
        for (int64_t i = begin; i < end; ++i) ++seen[i];
        ++ranges;
      });
      for (const int times : seen) EXPECT_EQ(times, 1);
      EXPECT_GE(ranges, std::min<int64_t>(GetParam(), (count + grain - 1) / grain));
    }
  }
}

// A thread that is busy elsewhere holds nobody up: the others do its work. Here the first piece
// ends only when all the others have been done.
TEST_P(ThreadPoolTest, OneSlowPieceHoldsUpNoOther) {
  if (GetParam() == 1) return;
  ThreadPool pool(GetParam());
  std::atomic<int> done = 0;
  pool.ParallelForEach(20, [&](int64_t piece, int64_t) {
    if (piece == 0) {
      EXPECT_TRUE(ComesTrue([&] { return done >= 19; }));
    } else {
      ++done;
    }
  });
  EXPECT_EQ(done, 19);
}

// The caller's modes are whatever the program left; a task's are the engine's.
TEST_P(ThreadPoolTest, AllThreadsKeepDenormalsAndRoundToNearest) {
  ThreadPool pool(GetParam());
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0xffc0);  // flush, denormals are zero, round toward zero
  std::vector<unsigned> modes(200);
  pool.ParallelForEach(200, [&](int64_t i, int64_t) { modes[i] = _mm_getcsr() & 0xffc0u; });
  _mm_setcsr(before);
  for (const unsigned mode : modes) EXPECT_EQ(mode, 0x1f80u);
}

// Idle workers sleep: they must wake for the next task all the same.
TEST_P(ThreadPoolTest, WakesAfterSleeping) {
  ThreadPool pool(GetParam());
  std::atomic<int> runs = 0;
  for (int i = 0; i < 5; ++i) {
    pool.ParallelForEach(30, [&](int64_t, int64_t) { ++runs; });
    const timespec pause{0, 2'000'000};  // longer than the spin
    nanosleep(&pause, nullptr);
  }
  EXPECT_EQ(runs, 5 * 30);
}

// More threads than processors run as well: 2, 3, 16.
INSTANTIATE_TEST_SUITE_P(Sizes, ThreadPoolTest, testing::Values(1, 2, 3, 16));

// Rank by rank: two threads from any CPU on.
TEST(ThreadPool, PinsFromTheFirstCpuOn) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  }
  const int count = static_cast<int>(cpus.size());
  for (int first = 0; first < count + 2; ++first) {
    cpu_set_t found[2];
    std::thread rank([&] {  // pinned itself, for good
      ThreadPool pool(2, /*pin=*/true, first);
      pool.ParallelFor(2, 1, [](int64_t, int64_t) {});
      cpu_set_t before;
      sched_getaffinity(0, sizeof(before), &before);
      EXPECT_TRUE(CPU_EQUAL(&before, &allowed));  // whoever only calls it stays where it is
      pool.PinCaller();
      std::atomic<int> done = 0;
      // Whoever has the first piece waits for the other to do all others.
      pool.ParallelForEach(20, [&](int worker, int64_t piece, int64_t) {
        if (piece == 0) EXPECT_TRUE(ComesTrue([&] { return done >= 19; }));
        sched_getaffinity(0, sizeof(cpu_set_t), &found[worker]);
        ++done;
      });
    });
    rank.join();
    for (int worker = 0; worker < 2; ++worker) {
      EXPECT_EQ(CPU_COUNT(&found[worker]), 1);
      EXPECT_TRUE(CPU_ISSET(cpus[(first + worker) % count], &found[worker])) << first << worker;
    }
  }
}

TEST(ThreadPool, StopsWithoutEverRunning) { ThreadPool pool(4); }

}  // namespace
}  // namespace treadle
