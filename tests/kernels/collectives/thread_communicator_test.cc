#include "kernels/collectives/thread_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <functional>
#include <thread>

#include "base/status.h"
#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr milliseconds kPatient{60'000};
// A wake-up that is missed outlasts the test's own time.
constexpr milliseconds kForever{3'600'000};

using Communicators = std::vector<std::unique_ptr<Communicator>>;

// body(communicator) on a thread per rank; returns when all have.
void OnRanks(Communicators& communicators, const std::function<void(Communicator&)>& body) {
  std::vector<std::thread> threads;
  for (const auto& communicator : communicators) {
    threads.emplace_back([&body, rank = communicator.get()] { body(*rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Values that rank `rank` brings to round `round`: of all magnitudes, so that sums depend on their
// order.
std::vector<float> Values(int rank, int round, int64_t count) {
  Random random(SeedOf(Str("rank ", rank), static_cast<uint64_t>(round)));
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    value = std::ldexp(random.Normal(), static_cast<int>(random.Below(24)) - 12);
  }
  return values;
}

std::vector<uint32_t> Bits(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

class ThreadCommunicatorTest : public testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Sizes, ThreadCommunicatorTest, testing::Values(1, 2, 3, 4));

TEST_P(ThreadCommunicatorTest, KnowsItsPlace) {
  Communicators ranks = CreateThreadCommunicators(size(), kPatient);
  ASSERT_EQ(std::ssize(ranks), size());
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_EQ(ranks[rank]->rank(), rank);
    EXPECT_EQ(ranks[rank]->size(), size());
  }
}

// Every rank overwrites its input as soon as the contract lets it: a late reader would see that.
TEST_P(ThreadCommunicatorTest, AllReduceIsTheAscendingSum) {
  constexpr int kRounds = 300;
  Random random(7);
  std::vector<int64_t> counts;
  for (int round = 0; round < kRounds; ++round) {
    counts.push_back(random.Below(3) == 0 ? random.Below(20'000) : random.Below(700));
  }
  Communicators ranks = CreateThreadCommunicators(size(), kPatient);
  std::vector<std::array<std::vector<float>, 2>> in_turn(size());
  OnRanks(ranks, [&](Communicator& rank) {
    auto& inputs = in_turn[rank.rank()];
    for (int round = 0; round < kRounds; ++round) {
      const int64_t count = counts[round];
      const bool accumulate = round % 2 == 1;
      std::vector<float> sum = Values(0, round, count);
      for (int other = 1; other < size(); ++other) {
        const std::vector<float> part = Values(other, round, count);
        for (int64_t i = 0; i < count; ++i) sum[i] += part[i];
      }
      std::vector<float> out = Values(100 + rank.rank(), round, count);
      for (int64_t i = 0; accumulate && i < count; ++i) sum[i] = out[i] + sum[i];
      std::vector<float>& in = inputs[round % 2];
      in = Values(rank.rank(), round, count);
      ASSERT_TRUE(rank.AllReduce(in.data(), count, accumulate, out.data()).ok());
      ASSERT_EQ(Bits(out), Bits(sum)) << "round " << round << " of rank " << rank.rank();
      std::ranges::fill(inputs[(round + 1) % 2], -1.0f);
    }
  });
}

TEST_P(ThreadCommunicatorTest, AllGatherLaysPartsInRankOrder) {
  Communicators ranks = CreateThreadCommunicators(size(), kPatient);
  std::vector<std::array<std::vector<uint16_t>, 2>> in_turn(size());
  OnRanks(ranks, [&](Communicator& rank) {
    auto& inputs = in_turn[rank.rank()];
    for (int round = 0; round < 200; ++round) {
      const size_t count = static_cast<size_t>(round * 31 % 997);
      std::vector<uint16_t>& in = inputs[round % 2];
      in.assign(count, static_cast<uint16_t>(round * 8 + rank.rank()));
      std::vector<uint16_t> out(count * size());
      ASSERT_TRUE(rank.AllGather(in.data(), count * 2, out.data()).ok());
      for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], round * 8 + i / count);
      std::ranges::fill(inputs[(round + 1) % 2], 0xffff);
    }
  });
}

TEST_P(ThreadCommunicatorTest, BroadcastLeavesItsBufferFree) {
  Communicators ranks = CreateThreadCommunicators(size(), kPatient);
  OnRanks(ranks, [&](Communicator& rank) {
    std::vector<int> data(333);
    for (int round = 0; round < 200; ++round) {
      const int root = round % size();
      std::ranges::fill(data, rank.rank() == root ? round : -1);
      ASSERT_TRUE(rank.Broadcast(data.data(), data.size() * sizeof(int), root).ok());
      ASSERT_THAT(data, testing::Each(round));
      std::ranges::fill(data, -2);
    }
  });
}

// Collectives of different kinds, one after the other, with ranks at random paces.
TEST_P(ThreadCommunicatorTest, KindsMixAtAnyPace) {
  Communicators ranks = CreateThreadCommunicators(size(), kPatient);
  OnRanks(ranks, [&](Communicator& rank) {
    Random pace(SeedOf("pace", static_cast<uint64_t>(rank.rank())));
    float in[2] = {};
    for (int round = 0; round < 100; ++round) {
      if (pace.Below(10) == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
      in[round % 2] = static_cast<float>(round + rank.rank());
      float sum = 0;
      ASSERT_TRUE(rank.AllReduce(&in[round % 2], 1, false, &sum).ok());
      ASSERT_EQ(sum, static_cast<float>(size() * round + size() * (size() - 1) / 2));
      int told = rank.rank() == 0 ? round : -1;
      ASSERT_TRUE(rank.Broadcast(&told, sizeof(told), 0).ok());
      ASSERT_EQ(told, round);
      const int mine = rank.rank();
      std::vector<int> all(size());
      ASSERT_TRUE(rank.AllGather(&mine, sizeof(mine), all.data()).ok());
      for (int other = 0; other < size(); ++other) ASSERT_EQ(all[other], other);
      ASSERT_TRUE(rank.Broadcast(nullptr, 0, 0).ok());  // `mine` has been read
    }
  });
}

TEST(ThreadCommunicatorErrors, AbortWakesWhoeverWaits) {
  Communicators ranks = CreateThreadCommunicators(3, kForever);
  std::atomic<int> waiting = 0;
  std::thread aborter([&] {
    while (waiting < 2) std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(5));  // long enough that both sleep, as a rule
    ranks[2]->Abort(absl::CancelledError("the epoch ended"));
    ranks[2]->Abort(absl::InternalError("a later reason"));
  });
  OnRanks(ranks, [&](Communicator& rank) {
    if (rank.rank() == 2) return;
    float in = 1, out = 0;
    ++waiting;
    EXPECT_EQ(rank.AllReduce(&in, 1, false, &out), absl::CancelledError("the epoch ended"));
  });
  aborter.join();
}

TEST(ThreadCommunicatorErrors, LaterCallsReturnTheFirstStatus) {
  Communicators ranks = CreateThreadCommunicators(2, kPatient);
  float in = 1, out = 0;
  const absl::Status reason = absl::UnavailableError("a worker is gone");
  ranks[0]->Abort(reason);
  ranks[1]->Abort(absl::InternalError("a later reason"));
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank->AllReduce(&in, 1, true, &out), reason);
    EXPECT_EQ(rank->AllGather(&in, 0, &out), reason);
    EXPECT_EQ(rank->Broadcast(&in, sizeof(in), 0), reason);
  }
}

TEST(ThreadCommunicatorErrors, AWaitEndsAtItsTimeout) {
  Communicators ranks = CreateThreadCommunicators(3, milliseconds(30));
  float in = 1, out = 0;
  // Rank 2 never comes.
  std::thread second([&] {
    float mine = 2, sum = 0;
    const absl::Status status = ranks[1]->AllReduce(&mine, 1, false, &sum);
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  });
  const absl::Status status = ranks[0]->AllReduce(&in, 1, false, &out);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("waited 30 ms for rank 2 in AllReduce"));
  second.join();
  EXPECT_EQ(ranks[2]->Broadcast(&in, sizeof(in), 2), status);
}

// Aborts at any moment of a running group: everyone ends, with that status.
TEST(ThreadCommunicatorErrors, AbortsAtAnyMoment) {
  for (int run = 0; run < 60; ++run) {
    Communicators ranks = CreateThreadCommunicators(3, kForever);
    std::thread aborter([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(17 * run));
      ranks[run % 3]->Abort(absl::CancelledError("now"));
    });
    // Alive as long as the group, as the contract asks.
    struct Buffers {
      std::vector<float> in[2] = {std::vector<float>(100), std::vector<float>(100)};
      std::vector<float> out = std::vector<float>(100);
    };
    std::vector<Buffers> buffers(3);
    OnRanks(ranks, [&](Communicator& rank) {
      Buffers& mine = buffers[rank.rank()];
      absl::Status status;
      for (int round = 0; status.ok(); ++round) {
        status = rank.AllReduce(mine.in[round % 2].data(), 100, true, mine.out.data());
        status.Update(rank.Broadcast(mine.out.data(), 400, round % 3));
      }
      EXPECT_EQ(status, absl::CancelledError("now"));
    });
    aborter.join();
  }
}

}  // namespace
}  // namespace treadle
