// Activations from GPU to GPU (--data-plane nccl): the bits of one GPU, and every way for an epoch
// to end. GPUs and NCCL are stand-ins in this process (tests/kernels/cuda/nccl/fake_nccl.h).
#include <atomic>
#include <functional>
#include <thread>

#include "kernels/collectives/nccl_communicator.h"
#include "kernels/op_cases/instrumented.h"
#include "tests/emulation/emulated_device.h"
#include "tests/engine/remote/gpu_cluster.h"
#include "tests/kernels/cuda/nccl/fake_nccl.h"
#include "tests/support/ranks/forwarding_communicator.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;
using CommunicatorOr = absl::StatusOr<std::unique_ptr<Communicator>>;

constexpr int kSender = 0;  // of a link: the earlier stage
constexpr int kReceiver = 1;

// After every test nothing is left, and the library was used as it may be.
class NcclStages : public testing::Test {
 protected:
  void SetUp() override { FakeNccl::Reset(); }
  void TearDown() override {
    EXPECT_EQ(FakeNccl::living, 0);
    EXPECT_EQ(FakeNccl::misuses, 0);
  }
};

ClusterOptions NcclCluster(int stages, int ranks = 1, const RankJoiner& link = JoinGpuLink) {
  ClusterOptions options = GpuCluster(stages, ranks);
  options.engine.data_plane = DataPlane::kNccl;
  options.worker.ranks.gpus.link = link;
  options.worker.ranks.gpus.can_link = CanJoinGpus;
  return options;
}

TEST_F(NcclStages, GiveTheBitsOfOneGpu) {
  for (const int stages : {2, 3}) {
    SCOPED_TRACE(Str(stages, " stages"));
    ExpectTheBitsOfOneGpu(NcclCluster(stages));
  }
  EXPECT_GT(FakeNccl::aborted, 0);
}

// Devices do everything as late as they may: what is sent before it is computed, or overwritten
// before it is sent, is something else.
TEST_F(NcclStages, AlsoWhereWorkRunsLate) {
  const cuda::ScopedEmulation late({.deferred = true});
  ExpectTheBitsOfOneGpu(NcclCluster(3));
}

// Longer than an iteration may be.
TEST_F(NcclStages, PromptsThatAreCut) {
  ClusterOptions options = NcclCluster(2);
  const Requests requests = FewRequests();
  PlanDriver expected(DriverOptions(1), requests);
  EngineClient one(OneGpu(options));
  RunOn(one, expected);
  options.engine.max_batch_tokens = 8;
  auto cluster = StartThreadCluster(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  PlanDriver::Options small = DriverOptions(4, 2);
  small.max_batch_tokens = 8;
  PlanDriver driver(small, requests);
  EngineClient client(std::move(cluster->engine));
  RunOn(client, driver);
  EXPECT_EQ(DifferentAnswers(expected, driver, requests), "");
}

class CountsBroadcasts final : public ForwardingCommunicator {
 public:
  CountsBroadcasts(std::unique_ptr<Communicator> below, std::atomic<int>& count)
      : ForwardingCommunicator(std::move(below)), count_(count) {}
  absl::Status Broadcast(void* data, size_t bytes, int root) override {
    ++count_;
    return ForwardingCommunicator::Broadcast(data, bytes, root);
  }

 private:
  std::atomic<int>& count_;
};

// Every rank receives for itself: nobody has to tell the others of its stage.
TEST_F(NcclStages, RanksOfStages) {
  Requests requests = FewRequests();
  requests.resize(3);
  std::atomic<int> broadcasts = 0;
  const auto answers = [&](ClusterOptions options) {
    options.worker.ranks.gpus.join =
        [&, join = options.worker.ranks.gpus.join](const RankJoin& asked) -> CommunicatorOr {
      TREADLE_ASSIGN_OR_RETURN(auto joined, join(asked));
      return std::make_unique<CountsBroadcasts>(std::move(joined), broadcasts);
    };
    return AnswersOf(options, requests);
  };
  const auto one = answers(GpuCluster(1, 2));
  const auto two = answers(NcclCluster(2, 2));
  EXPECT_EQ(DifferentAnswers(*one, *two, requests), "");
  EXPECT_EQ(broadcasts, 0);
  EXPECT_EQ(FakeNccl::aborted + FakeNccl::destroyed, 4);  // two ends for each of two ranks
  EXPECT_EQ(DifferentAnswers(*one, *answers(GpuCluster(2, 2)), requests), "");
  EXPECT_GT(broadcasts, 0);
}

// An epoch ends while work is on its way: it may not touch what is gone.
TEST_F(NcclStages, EpochsEndUnderLateWork) {
  const cuda::ScopedEmulation late({.deferred = true});
  std::atomic<int> epochs = 0;
  ClusterOptions options = NcclCluster(2, 1, [&](const RankJoin& join) -> CommunicatorOr {
    TREADLE_ASSIGN_OR_RETURN(auto joined, JoinGpuLink(join));
    if (join.rank != kSender || epochs++ % 2 == 1) return joined;
    return std::make_unique<SendsOnce>(std::move(joined));
  });
  options.engine.depth = 4;
  auto cluster = StartThreadCluster(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EngineClient client(std::move(cluster->engine));
  Engine& engine = client.engine();
  for (int round = 0; round < 10; ++round) {
    ASSERT_EQ(client.WaitForRoom(), absl::OkStatus());
    for (uint64_t i = 0; i < 4; ++i) engine.Submit(OneRequest(engine.epoch(), i));
    if (round % 2 == 0) {
      EXPECT_THAT(client.WaitForError().message(), HasSubstr("no second one"));
    } else {
      for (int i = 0; i < 4; ++i) EXPECT_TRUE(client.Next().ok());
    }
    ASSERT_EQ(client.Recover(), absl::OkStatus());
  }
}

// Receives nothing until it is broken.
class Stalls final : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  absl::StatusOr<Transfer> Recv(void*, size_t, int) override { return 0; }
  absl::Status Wait(Transfer) override {
    MutexLock lock(mutex_);
    while (why_.ok()) changed_.Wait(mutex_);
    return why_;
  }
  void Abort(absl::Status why) override {
    ForwardingCommunicator::Abort(why);
    MutexLock lock(mutex_);
    why_ = std::move(why);
    changed_.NotifyAll();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  absl::Status why_ ABSL_GUARDED_BY(mutex_);
};

// Runs requests to their end in the epoch that stands, and in the one after it.
void ExpectRightAnswers(EngineClient& client, const ClusterOptions& options) {
  const Requests requests = FewRequests();
  PlanDriver expected(DriverOptions(1), requests);
  EngineClient one(OneGpu(options));
  RunOn(one, expected);
  for (const uint32_t company : {2, 3}) {
    PlanDriver driver(DriverOptions(company, options.stages), requests);
    RunOn(client, driver);
    EXPECT_EQ(DifferentAnswers(expected, driver, requests), "");
    ASSERT_EQ(client.Recover(), absl::OkStatus());
  }
}

// Nobody takes what was sent; the third message after it needs its room.
TEST_F(NcclStages, ASendThatStallsEndsTheEpochAtTheDeadline) {
  std::atomic<bool> stalls = true;
  ClusterOptions options = NcclCluster(2, 1, [&](const RankJoin& join) -> CommunicatorOr {
    TREADLE_ASSIGN_OR_RETURN(auto joined, JoinGpuLink(join));
    if (join.rank != kReceiver || !stalls.exchange(false)) return joined;
    return std::make_unique<Stalls>(std::move(joined));
  });
  options.engine.depth = 8;
  options.engine.iteration_deadline = std::chrono::seconds(kInstrumented ? 20 : 5);
  auto cluster = StartThreadCluster(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EngineClient client(std::move(cluster->engine));
  for (uint64_t i = 0; i < 6; ++i) client.engine().Submit(OneRequest(1, i));
  const absl::Status status = client.WaitForError();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(status.message(), HasSubstr("stage "));
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  ExpectRightAnswers(client, options);
}

// One end of a link gives up while the other waits for it: for its id (the sender gave up), or for
// it to come (the receiver did). The other is there for the next epoch, which would otherwise end
// before that wait.
TEST_F(NcclStages, ConnectingIsCancelled) {
  for (const int victim : {kSender, kReceiver}) {
    SCOPED_TRACE(victim);
    std::atomic<bool> fails = false;
    ClusterOptions options = NcclCluster(2, 1, [&](const RankJoin& join) -> CommunicatorOr {
      if (join.rank == victim && fails.exchange(false)) return Internal("not today");
      return JoinGpuLink(
          {join.backend, join.rank, join.size, join.rendezvous, std::chrono::hours(1)});
    });
    options.engine.iteration_deadline = std::chrono::seconds(20);
    auto cluster = StartThreadCluster(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    EngineClient client(std::move(cluster->engine));
    fails = true;
    client.engine().Restart();
    const absl::Status status = client.WaitForRoom();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(status.message(), HasSubstr("not today"));
    EXPECT_THAT(status.message(), HasSubstr(Str("stage ", victim, " (")));
    ASSERT_EQ(client.Recover(1), absl::OkStatus());
    ExpectRightAnswers(client, options);
  }
}

// A worker is lost, and another one takes its place, at its address.
class LostWorkers : public NcclStages {
 protected:
  // `until_lost` brings the engine to where the worker goes, and takes what it then says.
  void Lose(int victim, const ClusterOptions& options,
            const std::function<absl::Status(EngineClient&, const std::function<void()>& lose)>&
                until_lost) {
    auto cluster = StartThreadCluster(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    EngineClient client(std::move(cluster->engine));
    std::unique_ptr<Worker>& worker = cluster->workers[victim];
    const std::string address = worker->address();
    const absl::Status status = until_lost(client, [&] { worker.reset(); });
    EXPECT_THAT(status.message(), HasSubstr(Str("stage ", victim, " (", address, ")")));
    WorkerOptions again = options.worker;
    again.model_path = options.model;
    again.listen = address;
    auto successor = Worker::Start(again);
    ASSERT_TRUE(successor.ok()) << successor.status();
    worker = *std::move(successor);
    ASSERT_EQ(client.Recover(), absl::OkStatus());
    ExpectRightAnswers(client, options);
  }
};

TEST_F(LostWorkers, BetweenIterations) {
  for (const int victim : {0, 1}) {
    Lose(victim, NcclCluster(2), [](EngineClient& client, const auto& lose) {
      client.engine().Submit(OneRequest(1, 0));
      EXPECT_TRUE(client.Next().ok());
      lose();
      return client.WaitForError();
    });
  }
}

// While plans are in flight: what one end has begun to send or to receive never ends by itself.
TEST_F(LostWorkers, AmongIterations) {
  for (const int victim : {0, 1}) {
    ClusterOptions options = NcclCluster(2);
    options.engine.depth = 8;
    Lose(victim, options, [](EngineClient& client, const auto& lose) {
      for (uint64_t i = 0; i < 8; ++i) client.engine().Submit(OneRequest(1, i));
      lose();
      return client.WaitForError();
    });
  }
}

// While the next epoch's links are being made.
TEST_F(LostWorkers, Connecting) {
  for (const int victim : {0, 1}) {
    std::atomic<bool> waits = false;
    std::atomic<bool> there = false;
    const ClusterOptions options = NcclCluster(2, 1, [&](const RankJoin& join) -> CommunicatorOr {
      if (join.rank != victim || !waits.exchange(false)) return JoinGpuLink(join);
      there = true;
      while (join.rendezvous.status().ok()) std::this_thread::yield();
      return join.rendezvous.status();
    });
    Lose(victim, options, [&](EngineClient& client, const auto& lose) {
      waits = true;
      client.engine().Restart();
      while (!there) std::this_thread::yield();
      lose();
      return client.WaitForRoom();
    });
  }
}

}  // namespace
}  // namespace treadle
