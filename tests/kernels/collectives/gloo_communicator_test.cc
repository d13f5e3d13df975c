// Gloo between threads and between processes: order, sizes, lost and absent peers, bounded waits.
// A wait that must be broken off has ten minutes, so that a test that hangs fails by ctest's limit.

#include "kernels/collectives/gloo_communicator.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/op_cases/random.h"
#include "tests/support/ranks/ranks.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using CommunicatorPtr = std::unique_ptr<Communicator>;
using Bytes = std::vector<uint8_t>;

constexpr milliseconds kLong{600'000};
constexpr milliseconds kShort{300};

GlooOptions Options(int rank, int size, milliseconds timeout) {
  return {.rank = rank,
          .size = size,
          .data_interface = "127.0.0.1",
          .timeout = timeout,
          .connect_timeout = milliseconds(20'000)};
}

CommunicatorPtr Join(int rank, int size, Rendezvous& rendezvous, milliseconds timeout = kLong) {
  auto communicator = CreateGlooCommunicator(Options(rank, size, timeout), rendezvous);
  EXPECT_TRUE(communicator.ok()) << communicator.status();
  return communicator.ok() ? std::move(*communicator) : nullptr;
}

// Runs fn(communicator) on a thread per rank.
void WithRanks(int size, milliseconds timeout, const std::function<void(Communicator&)>& fn) {
  MemoryRendezvous rendezvous;
  RunRankThreads(size, [&](int rank) {
    if (const CommunicatorPtr ours = Join(rank, size, rendezvous, timeout)) fn(*ours);
  });
}

// Both ranks of a pair, in this thread's hands.
std::pair<CommunicatorPtr, CommunicatorPtr> Pair(milliseconds timeout) {
  MemoryRendezvous rendezvous;
  CommunicatorPtr ranks[2];
  RunRankThreads(2, [&](int rank) { ranks[rank] = Join(rank, 2, rendezvous, timeout); });
  return {std::move(ranks[0]), std::move(ranks[1])};
}

const std::vector<size_t> kSizes = {1, 0, 31, 2048, 1, 65'536, 3'000'001, 8, 0, 4096};

// Every byte of every message between every pair is unlike its neighbours.
Bytes Message(int from, int to, size_t index, size_t bytes) {
  Bytes message(bytes);
  const uint64_t seed = SeedOf("message", 1000 * from + 100 * to + index);
  for (size_t i = 0; i < bytes; ++i) message[i] = static_cast<uint8_t>((seed + i * i * 31) >> 3);
  return message;
}

// All ranks send all sizes to all others, wait in another order, and get what was sent to them.
bool ExchangeAll(Communicator& ours) {
  struct Pending {
    Communicator::Transfer transfer;
    Bytes data, expected;
  };
  std::vector<Pending> all;
  all.reserve(2 * ours.size() * kSizes.size());
  for (size_t index = 0; index < kSizes.size(); ++index) {
    for (int peer = 0; peer < ours.size(); ++peer) {
      if (peer == ours.rank()) continue;
      Pending& out = all.emplace_back();
      out.data = out.expected = Message(ours.rank(), peer, index, kSizes[index]);
      const auto sent = ours.Send(out.data.data(), out.data.size(), peer);
      Pending& in = all.emplace_back();
      in.data.resize(kSizes[index]);
      in.expected = Message(peer, ours.rank(), index, kSizes[index]);
      const auto received = ours.Recv(in.data.data(), in.data.size(), peer);
      if (!sent.ok() || !received.ok()) return false;
      out.transfer = *sent;
      in.transfer = *received;
    }
  }
  for (size_t i = 0; i < all.size(); ++i) {
    const Pending& next = all[(7 * i + ours.rank()) % all.size()];
    if (!ours.Wait(next.transfer).ok()) return false;
  }
  return std::all_of(all.begin(), all.end(), [](const Pending& p) { return p.data == p.expected; });
}

TEST(GlooCommunicator, MessagesKeepTheirOrderBetweenThreads) {
  ASSERT_EQ(kSizes.size() % 7, 3u);  // so that the other order meets every transfer
  for (const int size : {2, 3}) {
    WithRanks(size, kLong, [](Communicator& ours) { EXPECT_TRUE(ExchangeAll(ours)); });
  }
}

TEST(GlooCommunicator, MessagesKeepTheirOrderBetweenProcesses) {
  const RendezvousFolder folder;
  RankProcesses processes(3, [&](int rank) {
    FolderRendezvous rendezvous(folder.path());
    const CommunicatorPtr ours = Join(rank, 3, rendezvous);
    return ours != nullptr && ExchangeAll(*ours);
  });
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(processes.Wait(rank), 0) << rank;
}

TEST(GlooCommunicator, AWaitEndsWithItsTimeout) {
  auto [ours, theirs] = Pair(kShort);
  Bytes data(100);
  const auto transfer = ours->Recv(data.data(), data.size(), 1);
  ASSERT_TRUE(transfer.ok());
  const absl::Status status = ours->Wait(*transfer);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  // It is broken for good, with the first reason, and the peer learns of it.
  EXPECT_EQ(ours->Send(data.data(), data.size(), 1).status(), status);
  const auto theirs_transfer = theirs->Recv(data.data(), data.size(), 0);
  EXPECT_FALSE(theirs_transfer.ok() && theirs->Wait(*theirs_transfer).ok());
}

// Gloo itself would end the process, or take the short message for a whole one.
TEST(GlooCommunicator, SizesThatDisagreeMeetTheDeadline) {
  for (const size_t sent : {size_t{50}, size_t{200}}) {
    auto [ours, theirs] = Pair(kShort);
    Bytes data(100), other(sent);
    const auto out = theirs->Send(other.data(), other.size(), 0);
    const auto in = ours->Recv(data.data(), data.size(), 1);
    ASSERT_TRUE(out.ok() && in.ok());
    EXPECT_EQ(ours->Wait(*in).code(), absl::StatusCode::kDeadlineExceeded);
  }
}

TEST(GlooCommunicator, MessagesInAnotherOrderMeetTheDeadline) {
  auto [ours, theirs] = Pair(kShort);
  Bytes small(50), large(100), first(100), second(50);
  EXPECT_TRUE(theirs->Send(small.data(), 50, 0).ok());
  EXPECT_TRUE(theirs->Send(large.data(), 100, 0).ok());
  const auto in = ours->Recv(first.data(), 100, 1);
  const auto next = ours->Recv(second.data(), 50, 1);
  ASSERT_TRUE(in.ok() && next.ok());
  EXPECT_EQ(ours->Wait(*in).code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(GlooCommunicator, AbortWakesAWaiterAtOnce) {
  for (const bool sending : {false, true}) {
    auto [ours, theirs] = Pair(kLong);
    Bytes data(1000);
    std::thread waiter([&, &ours = ours] {
      const auto transfer =
          sending ? ours->Send(data.data(), 1000, 1) : ours->Recv(data.data(), 1000, 1);
      const absl::Status status = transfer.ok() ? ours->Wait(*transfer) : transfer.status();
      EXPECT_EQ(status, absl::AbortedError("first"));
    });
    std::this_thread::sleep_for(milliseconds(20));  // so that it mostly waits already
    ours->Abort(absl::AbortedError("first"));
    ours->Abort(absl::AbortedError("second"));
    waiter.join();
    EXPECT_EQ(ours->Send(data.data(), 10, 1).status(), absl::AbortedError("first"));
    // The peer hears of it without an Abort of its own.
    const auto transfer = theirs->Recv(data.data(), data.size(), 0);
    EXPECT_FALSE(transfer.ok() && theirs->Wait(*transfer).ok());
  }
}

// A rank that has half a message when the other aborts may wait until its own timeout
// (gloo_communicator.h).
TEST(GlooCommunicator, AbortRacesWithTraffic) {
  for (int round = 0; round < 10; ++round) {
    // Outlive the communicators, whose threads may still write from them.
    Bytes in[2], out[2];
    auto [first, second] = Pair(milliseconds(1000));
    Communicator* ranks[] = {first.get(), second.get()};
    std::thread aborter([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(700 * round));
      ranks[round % 2]->Abort(absl::AbortedError("enough"));
    });
    RunRankThreads(2, [&](int rank) {
      out[rank].assign(12'000, static_cast<uint8_t>(1 + rank));
      for (;;) {
        in[rank].assign(12'000, 0);
        const auto received = ranks[rank]->Recv(in[rank].data(), 12'000, 1 - rank);
        const auto sent = ranks[rank]->Send(out[rank].data(), 12'000, 1 - rank);
        if (!received.ok() || !sent.ok() || !ranks[rank]->Wait(*received).ok()) break;
        ASSERT_EQ(in[rank], out[1 - rank]);
        if (!ranks[rank]->Wait(*sent).ok()) break;
      }
    });
    aborter.join();
  }
}

TEST(GlooCommunicator, APeerThatIsKilledWhileWeWait) {
  const RendezvousFolder folder;
  RankProcesses processes(2, [&](int rank) {
    FolderRendezvous rendezvous(folder.path());
    const CommunicatorPtr ours = Join(rank, 2, rendezvous);
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(50));
      raise(SIGKILL);
    }
    Bytes data(1000);
    const auto transfer = ours->Recv(data.data(), data.size(), 1);
    const absl::Status status = transfer.ok() ? ours->Wait(*transfer) : transfer.status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    return status.code() == absl::StatusCode::kUnavailable;
  });
  EXPECT_EQ(processes.Wait(0), 0);
  EXPECT_EQ(processes.Wait(1), 256 + SIGKILL);
}

// The message is larger than what sockets buffer, so its sender dies before it has left: nearly
// always, and if not, another one tries.
TEST(GlooCommunicator, APeerThatIsKilledInTheMiddleOfAMessage) {
  bool heard = false;
  for (int attempt = 0; attempt < 5 && !heard; ++attempt) {
    const RendezvousFolder folder;
    RankProcesses processes(2, [&](int rank) {
      Bytes data(size_t{256} << 20), ready(1);
      FolderRendezvous rendezvous(folder.path());
      const CommunicatorPtr ours = Join(rank, 2, rendezvous, milliseconds(1000));
      if (rank == 1) {
        if (!ours->Wait(*ours->Recv(ready.data(), 1, 0)).ok()) return false;
        (void)ours->Send(data.data(), data.size(), 0);
        raise(SIGKILL);
      }
      const auto transfer = ours->Recv(data.data(), data.size(), 1);
      if (!ours->Wait(*ours->Send(ready.data(), 1, 1)).ok()) return false;
      const absl::Status status = ours->Wait(*transfer);
      return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
    });
    heard = processes.Wait(0) == 0;
    EXPECT_EQ(processes.Wait(1), 256 + SIGKILL);
  }
  EXPECT_TRUE(heard);
}

TEST(GlooCommunicator, APeerThatGoesAfterItsLastSendIsHeard) {
  for (int round = 0; round < 5; ++round) {
    auto [ours, theirs] = Pair(kLong);
    Bytes data = Message(1, 0, round, 1'000'000), heard(data.size());
    const auto in = ours->Recv(heard.data(), heard.size(), 1);
    const auto out = theirs->Send(data.data(), data.size(), 0);
    ASSERT_TRUE(in.ok() && out.ok());
    ASSERT_TRUE(theirs->Wait(*out).ok());
    theirs.reset();
    EXPECT_TRUE(ours->Wait(*in).ok());
    EXPECT_EQ(heard, data);
  }
}

TEST(GlooCommunicator, RanksThatDoNotComeAndInterfacesThatAreNotThere) {
  MemoryRendezvous rendezvous;
  GlooOptions options = Options(0, 2, kShort);
  options.connect_timeout = kShort;
  EXPECT_EQ(CreateGlooCommunicator(options, rendezvous).status().code(),
            absl::StatusCode::kDeadlineExceeded);

  for (const char* name : {"no-such-interface", "203.0.113.7", ""}) {
    options.data_interface = name;
    const absl::Status status = CreateGlooCommunicator(options, rendezvous).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_NE(status.message().find("127.0.0.1"), std::string::npos) << status;
  }
  options = Options(2, 2, kShort);
  EXPECT_EQ(CreateGlooCommunicator(options, rendezvous).status().code(),
            absl::StatusCode::kInvalidArgument);
  options = Options(0, 1, kShort);
  for (const char* name : {"lo", "localhost"}) {
    options.data_interface = name;
    EXPECT_TRUE(CreateGlooCommunicator(options, rendezvous).ok()) << name;
  }
}

// A peer that published its address and was gone before we connected.
TEST(GlooCommunicator, APeerThatGoesWhileTheCommunicatorIsFormed) {
  for (const bool we_connect : {false, true}) {
    MemoryRendezvous rendezvous;
    // The side with the greater port connects; one of the two ports is not listened on.
    GlooOptions options = Options(we_connect ? 0 : 1, 2, kShort);
    options.connect_timeout = kShort;
    MemoryRendezvous aside;
    GlooOptions gone = options;
    gone.rank = 1 - options.rank;
    (void)CreateGlooCommunicator(gone, aside);
    const std::string key =
        "gloo/" + std::to_string(gone.rank) + "/" + std::to_string(options.rank);
    const auto address = aside.Get(key, Clock::now());
    ASSERT_TRUE(address.ok());
    ASSERT_TRUE(rendezvous.Set(key, *address).ok());
    const absl::Status status = CreateGlooCommunicator(options, rendezvous).status();
    EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) << status;
  }
}

size_t Entries(const char* folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

// Orderly and broken ones, with posted receives left over, one after the other.
TEST(GlooCommunicator, FiftyEpochsLeaveNothingBehind) {
  size_t threads = 0, files = 0;
  for (int epoch = 0; epoch < 50; ++epoch) {
    auto [ours, theirs] = Pair(kLong);
    Bytes data(3000), other(3000), late(3000);
    const auto in = ours->Recv(data.data(), data.size(), 1);
    const auto left_over = ours->Recv(late.data(), late.size(), 1);
    const auto out = theirs->Send(other.data(), other.size(), 0);
    ASSERT_TRUE(in.ok() && out.ok() && left_over.ok());
    ASSERT_TRUE(ours->Wait(*in).ok());
    ASSERT_TRUE(theirs->Wait(*out).ok());
    if (epoch % 3 == 1) theirs->Abort(absl::AbortedError("the epoch ends"));
    if (epoch % 3 == 2) {
      EXPECT_TRUE(theirs->Send(other.data(), other.size(), 0).ok());  // nobody waits for it
    }
    if (epoch % 2 == 1) theirs.reset();
    ours.reset();
    theirs.reset();
    if (epoch == 2) threads = Entries("/proc/self/task"), files = Entries("/proc/self/fd");
  }
  EXPECT_EQ(Entries("/proc/self/task"), threads);
  EXPECT_EQ(Entries("/proc/self/fd"), files);
}

}  // namespace
}  // namespace treadle
