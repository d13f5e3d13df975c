// How long messages take between two processes, printed; and what posting receives early is worth.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/collectives/gloo_communicator.h"
#include "tests/support/ranks/ranks.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<uint8_t>;

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The median of half a round trip, with receives posted before anything is sent.
double OneWaySeconds(Communicator& ours, size_t bytes) {
  constexpr int kRounds = 200;
  const int peer = 1 - ours.rank();
  Bytes in(bytes), out(bytes);
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    const Clock::time_point begin = Clock::now();
    const auto received = ours.Recv(in.data(), bytes, peer);
    if (ours.rank() == 1 && !ours.Wait(*received).ok()) return -1;
    const auto sent = ours.Send(out.data(), bytes, peer);
    if (!ours.Wait(*sent).ok()) return -1;
    if (ours.rank() == 0 && !ours.Wait(*received).ok()) return -1;
    times.push_back(SecondsSince(begin) / 2);
  }
  return Median(times);
}

// The median time that rank 1 waits for a message that rank 0 began to send some milliseconds ago,
// while rank 1 did something else.
double LeftToWaitSeconds(Communicator& ours, size_t bytes, bool early) {
  constexpr int kRounds = 30;
  Bytes data(bytes), ready(1);
  std::vector<double> times = {0};
  for (int round = 0; round < kRounds; ++round) {
    if (ours.rank() == 0) {
      if (!ours.Wait(*ours.Recv(ready.data(), 1, 1)).ok()) return -1;
      if (!ours.Wait(*ours.Send(data.data(), bytes, 1)).ok()) return -1;
      continue;
    }
    absl::StatusOr<Communicator::Transfer> received;
    if (early) received = ours.Recv(data.data(), bytes, 0);
    if (!ours.Wait(*ours.Send(ready.data(), 1, 0)).ok()) return -1;
    std::this_thread::sleep_for(milliseconds(8));
    const Clock::time_point begin = Clock::now();
    if (!early) received = ours.Recv(data.data(), bytes, 0);
    if (!ours.Wait(*received).ok()) return -1;
    times.push_back(SecondsSince(begin));
  }
  return Median(times);
}

TEST(GlooLatency, IsPrinted) {
  const RendezvousFolder folder;
  RankProcesses processes(2, [&](int rank) {
    FolderRendezvous rendezvous(folder.path());
    const auto joined = CreateGlooCommunicator({.rank = rank, .size = 2}, rendezvous);
    if (!joined.ok()) return false;
    Communicator* const ours = joined->get();
    for (const size_t bytes : {size_t{2} << 10, size_t{64} << 10, size_t{1} << 20}) {
      const double one_way = OneWaySeconds(*ours, bytes);
      const double early = LeftToWaitSeconds(*ours, bytes, true);
      const double late = LeftToWaitSeconds(*ours, bytes, false);
      if (one_way < 0 || early < 0 || late < 0) return false;
      if (rank == 1) {
        std::printf(
            "%zu KB: one way %.0f us; of a message sent 8 ms ago, %.0f us are left if its receive "
            "was posted early, %.0f us if it is posted now\n",
            bytes >> 10, one_way * 1e6, early * 1e6, late * 1e6);
      }
    }
    return true;
  });
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(processes.Wait(rank), 0);
}

}  // namespace
}  // namespace treadle
