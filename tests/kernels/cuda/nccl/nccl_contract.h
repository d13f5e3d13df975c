// Contract of the NCCL communicator on any library and devices: included by one test that runs it
// on GPUs and by one that runs it on emulated devices with a library between threads. Without GPUs
// the tests say why they are skipped.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/collectives/nccl_communicator.h"
#include "kernels/cuda/runtime/device.h"
#include "tests/support/ranks/ranks.h"

namespace treadle {
namespace {

using namespace std::chrono_literals;

// Given by who includes this: how many ranks there can be, and on which device each is.
int CountRanks(std::string* why);
int OrdinalOf(int rank);

// A rank of a test: its device, its communicator, and numbers on the device.
struct Rank {
  int rank = 0;
  std::unique_ptr<cuda::Device> device;
  std::unique_ptr<Communicator> communicator;
  std::vector<Buffer> buffers;

  template <typename T>
  T* Numbers(const std::vector<T>& values) {
    buffers.push_back(device->Allocate(values.size() * sizeof(T)).value());
    T* numbers = reinterpret_cast<T*>(buffers.back().data());
    device->CopyToDevice(numbers, values.data(), values.size() * sizeof(T));
    return numbers;
  }
  template <typename T>
  std::vector<T> Read(const T* numbers, size_t count) {
    std::vector<T> values(count);
    device->CopyToHost(values.data(), numbers, count * sizeof(T));
    return values;
  }
};

// Until another rank is done, or half a minute.
inline void WaitFor(const std::atomic<bool>& done) {
  for (int i = 0; i < 30'000 && !done; ++i) std::this_thread::sleep_for(1ms);
}

class NcclCommunicatorTest : public testing::Test {
 protected:
  void SetUp() override {
    ranks_ = std::min(CountRanks(&why_), 4);
    if (ranks_ == 0) GTEST_SKIP() << "no GPU: " << why_;
  }

  int ranks() const { return ranks_; }
  bool TooFew(int needed) {
    if (ranks_ >= needed) return false;
    [this, needed] { GTEST_SKIP() << "needs " << needed << " GPUs, found " << ranks_; }();
    return true;
  }

  // Runs `body` on a thread for each rank, with connected communicators.
  void Run(int size, NcclOptions options, const std::function<void(Rank&)>& body) {
    MemoryRendezvous rendezvous;
    RunRankThreads(size, [&](int r) {
      NcclOptions own = options;
      own.rank = r;
      own.size = size;
      Rank rank;
      rank.rank = r;
      rank.device = cuda::Device::Open(OrdinalOf(r)).value();
      rank.device->BindThread();
      auto communicator = CreateNcclCommunicator(own, *rank.device, rendezvous);
      ASSERT_TRUE(communicator.ok()) << communicator.status();
      rank.communicator = *std::move(communicator);
      body(rank);
      rank.communicator.reset();
    });
  }

 private:
  int ranks_ = 0;
  std::string why_;
};

TEST_F(NcclCommunicatorTest, Collectives) {
  for (int size = 1; size <= ranks(); ++size) {
    Run(size, {.max_count = 100}, [size](Rank& self) {
      const int r = self.rank;
      std::vector<float> in(257);
      for (int i = 0; i < 257; ++i) in[i] = static_cast<float>(1000 * r + i);
      float* const device_in = self.Numbers(in);
      float* const out = self.Numbers(std::vector<float>(257, 0.5f));
      Communicator& ranks = *self.communicator;
      EXPECT_TRUE(ranks.AllReduce(device_in, 257, /*accumulate=*/true, out).ok());
      const auto sums = self.Read(out, 257);
      for (int i = 0; i < 257; ++i) {
        EXPECT_EQ(sums[i], 0.5f + static_cast<float>(1000 * size * (size - 1) / 2 + size * i));
      }
      int32_t* const one = self.Numbers(std::vector<int32_t>{r + 7});
      int32_t* const all = self.Numbers(std::vector<int32_t>(size));
      EXPECT_TRUE(ranks.AllGather(one, 4, all).ok());
      for (int i = 0; i < size; ++i) EXPECT_EQ(self.Read(all, size)[i], i + 7);
      EXPECT_TRUE(ranks.Broadcast(one, 4, size - 1).ok());
      EXPECT_EQ(self.Read(one, 1)[0], size + 6);
    });
  }
}

// Captured work does not run, and then runs as often as it is replayed, on what is there then.
TEST_F(NcclCommunicatorTest, CollectivesInAGraph) {
  for (int size = 1; size <= ranks(); ++size) {
    Run(size, {.max_count = 100}, [size](Rank& self) {
      Communicator& ranks = *self.communicator;
      ASSERT_TRUE(ranks.asynchronous());
      float* const in = self.Numbers(std::vector<float>(257));
      float* const out = self.Numbers(std::vector<float>(257, 0.5f));
      float* const all = self.Numbers(std::vector<float>(size));
      self.device->BeginCapture();
      EXPECT_TRUE(ranks.AllReduce(in, 257, /*accumulate=*/true, out).ok());
      EXPECT_TRUE(ranks.AllGather(out + 256, sizeof(float), all).ok());
      EXPECT_TRUE(ranks.Broadcast(all, sizeof(float), size - 1).ok());
      auto graph = self.device->EndCapture();
      ASSERT_TRUE(graph.ok()) << graph.status();
      EXPECT_EQ(self.Read(out, 257), std::vector<float>(257, 0.5f));
      float expected = 0.5f;
      for (int replay = 1; replay <= 3; ++replay) {
        const std::vector<float> now(257, static_cast<float>(replay * (self.rank + 1)));
        self.device->CopyToDevice(in, now.data(), now.size() * sizeof(float));
        self.device->Replay(**graph);
        expected += static_cast<float>(replay * size * (size + 1) / 2);
        EXPECT_EQ(self.Read(out, 257), std::vector<float>(257, expected));
        EXPECT_EQ(self.Read(all, size), std::vector<float>(size, expected));
      }
      EXPECT_EQ(self.device->Synchronize(), absl::OkStatus());
      graph->reset();
    });
  }
}

// A pipeline's middle stage announces its next input before it sends its output.
TEST_F(NcclCommunicatorTest, AReceiveThatWasBegunEarlyDoesNotHoldUpASend) {
  if (TooFew(2)) return;
  Run(ranks(), {.link = true}, [size = ranks()](Rank& self) {
    constexpr int kMessages = 5;
    Communicator& ranks = *self.communicator;
    std::vector<Communicator::Transfer> sends;
    std::vector<Communicator::Transfer> receives;
    std::vector<int32_t*> buffers;
    const auto begin_receive = [&] {
      buffers.push_back(self.Numbers(std::vector<int32_t>{-1}));
      receives.push_back(ranks.Recv(buffers.back(), 4, self.rank - 1).value());
    };
    if (self.rank > 0) begin_receive();
    for (int m = 0; m < kMessages; ++m) {
      if (self.rank > 0) {
        begin_receive();  // one more than will come
        EXPECT_TRUE(ranks.Wait(receives[m]).ok());
        EXPECT_EQ(self.Read(buffers[m], 1)[0], 100 + m);
      } else {
        buffers.push_back(self.Numbers(std::vector<int32_t>{100 + m}));
      }
      if (self.rank + 1 < size) sends.push_back(ranks.Send(buffers[m], 4, self.rank + 1).value());
    }
    for (const auto send : sends) EXPECT_TRUE(ranks.Wait(send).ok());
  });
}

TEST_F(NcclCommunicatorTest, ReceivesOfOnePeerKeepTheirOrder) {
  if (TooFew(2)) return;
  Run(2, {.link = true}, [](Rank& self) {
    Communicator& ranks = *self.communicator;
    int32_t* const numbers = self.Numbers(std::vector<int32_t>{self.rank, 10 + self.rank});
    if (self.rank == 0) {
      const auto first = ranks.Send(numbers, 4, 1).value();
      const auto second = ranks.Send(numbers + 1, 4, 1).value();
      EXPECT_TRUE(ranks.Wait(second).ok());
      EXPECT_TRUE(ranks.Wait(first).ok());
    } else {
      const auto first = ranks.Recv(numbers, 4, 0).value();
      const auto second = ranks.Recv(numbers + 1, 4, 0).value();
      EXPECT_TRUE(ranks.Wait(second).ok());
      EXPECT_TRUE(ranks.Wait(first).ok());
      EXPECT_EQ(self.Read(numbers, 2), (std::vector<int32_t>{0, 10}));
    }
  });
}

TEST_F(NcclCommunicatorTest, EveryWaitEnds) {
  if (TooFew(2)) return;
  std::atomic<bool> done = false;
  Run(2, {.link = true, .timeout = 500ms}, [&done](Rank& self) {
    if (self.rank == 0) return WaitFor(done);
    Communicator& ranks = *self.communicator;
    int32_t* const numbers = self.Numbers(std::vector<int32_t>{1, 2});
    const auto transfer = ranks.Recv(numbers, 4, 0).value();
    const absl::Status status = ranks.Wait(transfer);
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_NE(status.message().find("a message from rank 0"), std::string::npos) << status;
    // Broken for good, with the first reason.
    EXPECT_EQ(ranks.Wait(transfer), status);
    EXPECT_EQ(ranks.Recv(numbers, 4, 0).status(), status);
    done = true;
  });
}

TEST_F(NcclCommunicatorTest, AbortWakesAWaitingRank) {
  if (TooFew(2)) return;
  std::atomic<bool> done = false;
  Run(2, {.link = true, .timeout = 60'000ms}, [&done](Rank& self) {
    if (self.rank == 0) {
      WaitFor(done);
      return self.communicator->Abort(absl::CancelledError("not needed"));
    }
    int32_t* const numbers = self.Numbers(std::vector<int32_t>{1, 2, 3});
    std::thread other([&] {
      std::this_thread::sleep_for(20ms);
      self.communicator->Abort(absl::CancelledError("enough"));
      self.communicator->Abort(absl::InternalError("late"));
    });
    const auto message = self.communicator->Recv(numbers, 4, 0);
    const absl::Status status = message.ok() ? self.communicator->Wait(*message) : message.status();
    other.join();
    EXPECT_EQ(status, absl::CancelledError("enough"));
    done = true;
  });
}

}  // namespace
}  // namespace treadle
