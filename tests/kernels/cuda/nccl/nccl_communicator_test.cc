// The NCCL communicator's own logic against a library between threads (fake_nccl.h), with emulated
// devices, and the sum of its all-reduce by emulation.
#include "kernels/collectives/nccl_communicator.h"

#include <random>

#include "kernels/collectives/nccl_lane.h"
#include "kernels/cuda/ops.h"
#include "tests/kernels/cuda/nccl/fake_nccl.h"
#include "tests/kernels/cuda/nccl/nccl_contract.h"

namespace treadle {
namespace {

int CountRanks(std::string*) { return 3; }
int OrdinalOf(int rank) { return rank % 2; }

// After every test: nothing is left, and the library was used as it may be.
class LibraryUse : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { FakeNccl::Reset(); }
  void OnTestEnd(const testing::TestInfo&) override {
    EXPECT_EQ(FakeNccl::living, 0);
    EXPECT_EQ(FakeNccl::misuses, 0);
  }
};
[[maybe_unused]] const bool g_listens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new LibraryUse);  // which owns it
  return true;
}();

TEST(RankSum, IsOneSumInRankOrder) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 100);
  const auto device = cuda::Device::Open(0).value();
  for (const int ranks : {1, 2, 3, 8}) {
    for (const int64_t count : {1, 255, 257, 5000}) {
      std::vector<float> parts(ranks * count);
      std::vector<float> out(count);
      for (float& x : parts) x = normal(random);
      for (float& x : out) x = normal(random);
      const Buffer device_parts = device->Allocate(parts.size() * 4).value();
      const Buffer device_out = device->Allocate(out.size() * 4).value();
      device->CopyToDevice(device_parts.data(), parts.data(), parts.size() * 4);
      for (const bool accumulate : {false, true}) {
        device->CopyToDevice(device_out.data(), out.data(), out.size() * 4);
        cuda::RankSum(*device, reinterpret_cast<const float*>(device_parts.data()), ranks, count,
                      accumulate, reinterpret_cast<float*>(device_out.data()));
        std::vector<float> got(count);
        device->CopyToHost(got.data(), device_out.data(), got.size() * 4);
        for (int64_t i = 0; i < count; ++i) {
          float sum = parts[i];
          for (int r = 1; r < ranks; ++r) sum += parts[r * count + i];
          EXPECT_EQ(got[i], accumulate ? out[i] + sum : sum);
        }
      }
    }
  }
}

using FakeNcclTest = NcclCommunicatorTest;

TEST_F(FakeNcclTest, AnEndOfAllRanksIsInOrder) {
  Run(3, {}, [](Rank&) {});
  EXPECT_EQ(FakeNccl::destroyed, 3);
  EXPECT_EQ(FakeNccl::aborted, 0);
}

TEST_F(FakeNcclTest, ATimeoutIsTheDevicesErrorToo) {
  Run(2, {.timeout = 50ms}, [](Rank& self) {
    if (self.rank == 1) return;
    int32_t* const number = self.Numbers(std::vector<int32_t>{1});
    const absl::Status status = self.communicator->Broadcast(number, 4, 0);
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_EQ(self.device->Synchronize(), status);
  });
  EXPECT_GT(FakeNccl::aborted, 0);
}

TEST_F(FakeNcclTest, ALostPeerIsAnErrorOfTheNextWait) {
  Run(1, {}, [](Rank& self) {
    EXPECT_TRUE(self.device->Synchronize().ok());
    FakeNccl::failing_rank = 0;
    const absl::Status status = self.device->Synchronize();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_NE(status.message().find("a peer is gone"), std::string::npos) << status;
  });
}

// For one direction, one communicator of the library.
TEST_F(FakeNcclTest, ALinkIsOneCommunicator) {
  Run(2, {.link = true}, [](Rank& self) {
    int32_t* const number = self.Numbers(std::vector<int32_t>{40 + self.rank});
    const auto transfer = self.rank == 0 ? self.communicator->Send(number, 4, 1)
                                         : self.communicator->Recv(number, 4, 0);
    EXPECT_EQ(self.communicator->Wait(*transfer), absl::OkStatus());
    EXPECT_EQ(self.Read(number, 1)[0], 40);
  });
  EXPECT_EQ(FakeNccl::destroyed, 2);
}

// No work of the device waits for a transfer.
TEST_F(FakeNcclTest, ABrokenTransferIsNoFailureOfTheDevice) {
  Run(2, {.link = true, .timeout = 50ms}, [](Rank& self) {
    int32_t* const number = self.Numbers(std::vector<int32_t>{1});
    if (self.rank == 1) return;
    const auto transfer = self.communicator->Send(number, 4, 1).value();
    EXPECT_EQ(self.communicator->Wait(transfer).code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(self.device->Synchronize(), absl::OkStatus());
    EXPECT_FALSE(self.communicator->Send(number, 4, 1).ok());  // and it is not asked again
  });
}

// Another thread may have broken it since its rank asked last.
TEST_F(FakeNcclTest, NothingIsIssuedAfterRevoke) {
  NcclLane lane;
  ASSERT_EQ(lane.Begin(NcclLane::MakeId().value(), 0, 1, nullptr), absl::OkStatus());
  lane.Revoke();
  bool called = false;
  const auto call = [&](ncclComm*) {
    called = true;
    return 0;
  };
  EXPECT_EQ(lane.Issue(call, "a call").code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(called);
  lane.Drain(std::chrono::steady_clock::now());
}

// Wherever a rank waits for the others: for an id, or for them to come.
TEST_F(FakeNcclTest, ARendezvousThatIsOverEndsTheForming) {
  for (const int rank : {0, 1}) {
    MemoryRendezvous rendezvous;
    const auto device = cuda::Device::Open(0).value();
    std::thread other([&] {
      // Rank 0 waits in the library once it has said its id.
      while (rank == 0 && !rendezvous.Get("nccl", std::chrono::steady_clock::now()).ok()) {
      }
      rendezvous.Cancel(absl::CancelledError("not wanted"));
    });
    const auto alone = CreateNcclCommunicator({.rank = rank, .size = 2, .connect_timeout = 600s},
                                              *device, rendezvous);
    other.join();
    EXPECT_EQ(alone.status(), absl::CancelledError("not wanted"));
  }
}

TEST_F(FakeNcclTest, ARankThatDoesNotCome) {
  MemoryRendezvous rendezvous;
  const auto device = cuda::Device::Open(0).value();
  const auto alone =
      CreateNcclCommunicator({.size = 2, .connect_timeout = 50ms}, *device, rendezvous);
  EXPECT_EQ(alone.status().code(), absl::StatusCode::kDeadlineExceeded) << alone.status();
  MemoryRendezvous empty;
  const auto second =
      CreateNcclCommunicator({.rank = 1, .size = 2, .connect_timeout = 50ms}, *device, empty);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kDeadlineExceeded) << second.status();
  EXPECT_EQ(CreateNcclCommunicator({.rank = 2, .size = 2}, *device, empty).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace treadle
