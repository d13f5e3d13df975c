// Tensor-parallel ranks on GPUs whose collectives are part of the devices' work: in graphs, one
// iteration ahead of the host, and through every end of an epoch. GPUs and NCCL are stand-ins in
// this process (tests/kernels/cuda/nccl/fake_nccl.h).
#include <atomic>

#include "kernels/collectives/nccl_communicator.h"
#include "tests/emulation/emulated_device.h"
#include "tests/engine/remote/gpu_cluster.h"
#include "tests/kernels/cuda/nccl/fake_nccl.h"
#include "tests/support/ranks/forwarding_communicator.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;
using CommunicatorOr = absl::StatusOr<std::unique_ptr<Communicator>>;

// Counts what ranks are asked to do; the replay of a graph asks nobody.
class CountsReductions final : public ForwardingCommunicator {
 public:
  CountsReductions(std::unique_ptr<Communicator> below, std::atomic<int>& count)
      : ForwardingCommunicator(std::move(below)), count_(count) {}
  absl::Status AllReduce(const float* in, int64_t count, bool accumulate, float* out) override {
    ++count_;
    return ForwardingCommunicator::AllReduce(in, count, accumulate, out);
  }

 private:
  std::atomic<int>& count_;
};

// After every test nothing is left, and the library was used as it may be: above all, no graph was
// left that used a communicator when it went.
class GpuRanks : public testing::Test {
 protected:
  void SetUp() override { FakeNccl::Reset(); }
  void TearDown() override {
    EXPECT_EQ(FakeNccl::living, 0);
    EXPECT_EQ(FakeNccl::misuses, 0);
  }

  ClusterOptions Cluster(int stages) {
    ClusterOptions options = GpuCluster(stages, 2);
    options.worker.ranks.gpus.join = [this](const RankJoin& join) -> CommunicatorOr {
      TREADLE_ASSIGN_OR_RETURN(auto joined, JoinGpuRanks(join));
      return std::make_unique<CountsReductions>(std::move(joined), reductions_);
    };
    if (stages == 1) return options;
    options.engine.data_plane = DataPlane::kNccl;
    options.worker.ranks.gpus.can_link = CanJoinGpus;
    options.worker.ranks.gpus.link = JoinGpuLink;
    return options;
  }

  // How often a rank was asked for a reduction while one request got so many tokens.
  int ReductionsFor(int32_t new_tokens) {
    PlanDriver::DrivenRequest driven;
    driven.request.prompt = {1, 2, 3, 4, 5};
    driven.request.max_new_tokens = new_tokens;
    driven.request.sampling.temperature = 0;
    driven.guesses = false;
    reductions_ = 0;
    AnswersOf(Cluster(1), {driven});
    return reductions_;
  }

  std::atomic<int> reductions_ = 0;
};

Requests ThreeRequests() {
  Requests requests = FewRequests();
  requests.resize(3);
  return requests;
}

// As ranks whose communicator is the host's, which neither capture nor run ahead.
TEST_F(GpuRanks, GiveTheAnswersOfRanksThatMeetOnTheHost) {
  const Requests requests = ThreeRequests();
  const auto host = AnswersOf(GpuCluster(1, 2), requests);
  EXPECT_EQ(DifferentAnswers(*host, *AnswersOf(Cluster(1), requests), requests), "");
  EXPECT_GT(reductions_, 0);
  EXPECT_EQ(DifferentAnswers(*host, *AnswersOf(Cluster(2), requests), requests), "");
}

// Devices do everything as late as they may.
TEST_F(GpuRanks, AlsoWhereWorkRunsLate) {
  const Requests requests = ThreeRequests();
  const auto host = AnswersOf(GpuCluster(1, 2), requests);
  const cuda::ScopedEmulation late({.deferred = true});
  for (const int stages : {1, 2}) {
    SCOPED_TRACE(stages);
    EXPECT_EQ(DifferentAnswers(*host, *AnswersOf(Cluster(stages), requests), requests), "");
  }
}

// The prompt, decoding as it is, decoding captured: whatever comes after is replayed.
TEST_F(GpuRanks, ReplayTheirCollectives) {
  const int few = ReductionsFor(4);
  EXPECT_GT(few, 0);
  EXPECT_EQ(ReductionsFor(9), few);
}

// Graphs of one epoch hold its communicators; the next one captures anew.
TEST_F(GpuRanks, EveryEpochHasItsOwnGraphs) {
  for (const bool deferred : {false, true}) {
    const cuda::ScopedEmulation emulation({.deferred = deferred});
    const Requests requests = ThreeRequests();
    const ClusterOptions options = Cluster(1);
    auto cluster = StartThreadCluster(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    EngineClient client(std::move(cluster->engine));
    std::vector<std::unique_ptr<PlanDriver>> drivers;
    for (int epoch = 0; epoch < 3; ++epoch) {
      drivers.push_back(std::make_unique<PlanDriver>(DriverOptions(7), requests));
      RunOn(client, *drivers.back());
      EXPECT_EQ(DifferentAnswers(*drivers[0], *drivers.back(), requests), "");
      // It ends under plans that are on their way.
      for (uint64_t i = 0; epoch == 1 && i < 2; ++i) {
        ASSERT_EQ(client.Recover(), absl::OkStatus());
        client.engine().Submit(OneRequest(client.engine().epoch(), 0));
      }
      ASSERT_EQ(client.Recover(), absl::OkStatus());
    }
  }
}

// The devices are as good as before when the epoch is over.
TEST_F(GpuRanks, ALostPeerEndsTheEpochAndNoMore) {
  const ClusterOptions options = Cluster(1);
  auto cluster = StartThreadCluster(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EngineClient client(std::move(cluster->engine));
  const Requests requests = ThreeRequests();
  PlanDriver before(DriverOptions(7), requests);
  RunOn(client, before);
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  FakeNccl::failing_rank = 1;
  client.engine().Submit(OneRequest(client.engine().epoch(), 0));
  const absl::Status status = client.WaitForError();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(status.message(), HasSubstr("a peer is gone"));
  FakeNccl::failing_rank = -1;
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  PlanDriver after(DriverOptions(7), requests);
  RunOn(client, after);
  EXPECT_EQ(DifferentAnswers(before, after, requests), "");
}

}  // namespace
}  // namespace treadle
