// A lost stage alone runs again what was known, from what the stage before it sent.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <numeric>

#include "engine/kv/kept_memory.h"
#include "kernels/op_cases/instrumented.h"
#include "tests/engine/plan_builder.h"
#include "tests/engine/remote/driven_requests.h"
#include "tests/support/assert_ok.h"
#include "tests/support/ranks/remote_cluster.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

constexpr int kStages = 3;
constexpr int32_t kPrompt = 41;  // of sequence 1; on two pages and a part of the third
constexpr int32_t kShort = 5;    // of sequence 2
constexpr int32_t kKnown = 6;    // tokens of each before the loss
constexpr int32_t kRest = 8;     // and after it

std::vector<int32_t> Ids(int32_t count, int32_t first) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

// Two greedy sequences on an engine, plan by plan.
class TwoSequences {
 public:
  explicit TwoSequences(EngineClient& client) : client_(client) {}

  // A new epoch: the prompts, one in two chunks, and the tokens that are known before the loss.
  absl::Status Begin() {
    iteration_ = 0;
    inputs_ = {Ids(kPrompt, 3), Ids(kShort, 90)};
    TREADLE_RETURN_IF_ERROR(Run(Plan()
                                    .Start(StartOf(1, kPrompt, {7, 2, 4, 9}))
                                    .Start(StartOf(2, kShort, {1, 0}))
                                    .Step(StepOf(1, 0, Ids(30, 3)))
                                    .Step(SampleOf(StepOf(2, 0, inputs_[1]), 1))));
    TREADLE_RETURN_IF_ERROR(Run(Plan().Step(SampleOf(StepOf(1, 30, Ids(kPrompt - 30, 33)), 1))));
    return Decode(kKnown);
  }
  // The same after a loss: all inputs but the last again, in other chunks, on these stages alone.
  absl::Status Again(const StageRange& stages) {
    TREADLE_RETURN_IF_ERROR(SomeAgain(stages));
    return RestAgain(stages);
  }
  absl::Status SomeAgain(const StageRange& stages) {
    iteration_ = 0;
    return Run(
        Plan().Stages(stages).Start(StartOf(1, kPrompt, {7, 2, 4, 9})).Step(Known(0, 0, 17)));
  }
  absl::Status RestAgain(const StageRange& stages) {
    return Run(Plan()
                   .Stages(stages)
                   .Start(StartOf(2, kShort, {1, 0}))
                   .Step(Known(1, 0, static_cast<int32_t>(inputs_[1].size()) - 1))
                   .Step(Known(0, 17, static_cast<int32_t>(inputs_[0].size()) - 1)));
  }
  absl::Status Decode(int32_t tokens) {
    for (int32_t i = 0; i < tokens; ++i) {
      PlanOf plan = Plan();
      for (const size_t sequence : {0, 1}) {
        const auto position = static_cast<int32_t>(inputs_[sequence].size()) - 1;
        plan.Step(SampleOf(StepOf(sequence + 1, position, {inputs_[sequence].back()}), 1));
      }
      TREADLE_RETURN_IF_ERROR(Run(plan));
    }
    return absl::OkStatus();
  }
  // Token and log probability of all that was sampled since the last call.
  std::vector<std::pair<int32_t, float>> Take() { return std::exchange(samples_, {}); }

 private:
  Step Known(size_t sequence, int32_t begin, int32_t end) const {
    const auto first = inputs_[sequence].begin();
    return StepOf(sequence + 1, begin, {first + begin, first + end});
  }
  PlanOf Plan() { return PlanOf(client_.engine().epoch(), iteration_++); }
  absl::Status Run(const IterationPlan& plan) {
    TREADLE_RETURN_IF_ERROR(client_.WaitForRoom());
    client_.engine().Submit(plan);
    TREADLE_ASSIGN_OR_RETURN(const IterationResult result, client_.Next());
    for (const StepResult& step : result.steps) {
      if (step.token() < 0) continue;
      inputs_[step.sequence - 1].push_back(step.token());
      samples_.push_back({step.token(), step.outputs.back().detail.logprob});
    }
    return absl::OkStatus();
  }

  EngineClient& client_;
  uint64_t iteration_ = 0;
  std::vector<std::vector<int32_t>> inputs_;
  std::vector<std::pair<int32_t, float>> samples_;
};

ClusterOptions ThreeStages(WireType wire) {
  ClusterOptions options;
  TinyModelOptions model;
  model.layers = kStages;
  options.model = *WriteTinyLlamaGguf(OwnFolder().path(), model);
  options.stages = kStages;
  options.engine.wire = wire;
  options.engine.suspicion = std::chrono::seconds(10);  // a worker of this process ends slowly
  if (wire == WireType::kBf16) options.engine.tensor_parallel = 2;
  return options;
}

// Kills these workers, starts others in their places, and begins epochs until one stands; returns
// the stages that the engine says were lost.
StageRange Replace(ProcessCluster& cluster, EngineClient& client, const std::string& model,
                   const std::vector<int>& victims) {
  client.engine().TakeLost();
  for (const int victim : victims) {
    const std::string address = cluster.workers[victim]->address();
    cluster.workers[victim]->Kill();
    cluster.workers[victim] = std::make_unique<WorkerProcess>(address, model);
  }
  EXPECT_FALSE(client.WaitForError().ok());
  EXPECT_EQ(client.Recover(), absl::OkStatus());
  return client.engine().TakeLost();
}

class RemoteReplay : public testing::TestWithParam<WireType> {};

TEST_P(RemoteReplay, TheLostStageAloneComputesAgain) {
  const ClusterOptions options = ThreeStages(GetParam());
  ASSERT_OK_AND_ASSIGN(auto cluster, StartProcessCluster(options));
  EngineClient client(std::move(cluster.engine));
  EXPECT_GE(client.engine().replay_pages(), 10);
  TwoSequences sequences(client);
  ASSERT_EQ(sequences.Begin(), absl::OkStatus());
  ASSERT_EQ(sequences.Decode(kRest), absl::OkStatus());
  const auto undisturbed = sequences.Take();
  const std::vector<std::vector<int>> losses = {{0}, {1}, {2}, {0, 1}, {1, 2}};
  for (const std::vector<int>& victims : losses) {
    ASSERT_EQ(client.Recover(), absl::OkStatus());
    ASSERT_EQ(sequences.Begin(), absl::OkStatus());
    const StageRange lost = Replace(cluster, client, options.model, victims);
    EXPECT_EQ(lost, (StageRange{victims.front(), victims.back() + 1}));
    ASSERT_EQ(sequences.Again(lost), absl::OkStatus()) << lost.begin;
    ASSERT_EQ(sequences.Decode(kRest), absl::OkStatus());
    EXPECT_EQ(sequences.Take(), undisturbed) << lost.begin << " to " << lost.end;
  }
}

INSTANTIATE_TEST_SUITE_P(Wires, RemoteReplay,
                         testing::Values(WireType::kF32, WireType::kBf16, WireType::kInt8),
                         [](const auto& info) { return std::string(Name(info.param)); });

// Stages that a plan leaves out leave their caches as they are, and do not compute.
TEST(RemoteReplay, StagesThatKeptTheirPagesDoNotRun) {
  const ClusterOptions options = ThreeStages(WireType::kF32);
  ASSERT_OK_AND_ASSIGN(auto cluster, StartProcessCluster(options));
  EngineClient client(std::move(cluster.engine));
  TwoSequences sequences(client);
  ASSERT_EQ(sequences.Begin(), absl::OkStatus());
  ASSERT_EQ(sequences.Decode(kRest), absl::OkStatus());
  const auto undisturbed = sequences.Take();
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  ASSERT_EQ(sequences.Begin(), absl::OkStatus());
  Replace(cluster, client, options.model, {1});
  // Another stage than the lost one, which has nothing to give and says so: after an epoch or two
  // where the machine is so busy that one ends for another reason.
  std::string said;
  for (int attempt = 0; attempt < 5 && said.find("its row at position 0") == said.npos; ++attempt) {
    if (attempt > 0) {
      ASSERT_EQ(client.Recover(), absl::OkStatus());
    }
    said = std::string(sequences.Again({2, 3}).message());
  }
  EXPECT_THAT(said, HasSubstr("do not hold its row at position 0"));
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  const StageRange lost = client.engine().TakeLost();
  EXPECT_TRUE(lost.Contains(1));
  ASSERT_EQ(sequences.Again(lost), absl::OkStatus());
  ASSERT_EQ(sequences.Decode(kRest), absl::OkStatus());
  EXPECT_EQ(sequences.Take(), undisturbed);
}

TEST(RemoteReplay, WithoutALogTheStagesBeforeRunAgain) {
  ClusterOptions options = ThreeStages(WireType::kF32);
  options.engine.replay_log_memory = 0;
  ASSERT_OK_AND_ASSIGN(auto cluster, StartProcessCluster(options));
  EngineClient client(std::move(cluster.engine));
  EXPECT_EQ(client.engine().replay_pages(), 0);
  TwoSequences sequences(client);
  ASSERT_EQ(sequences.Begin(), absl::OkStatus());
  ASSERT_EQ(sequences.Decode(kRest), absl::OkStatus());
  const auto undisturbed = sequences.Take();
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  ASSERT_EQ(sequences.Begin(), absl::OkStatus());
  StageRange lost = Replace(cluster, client, options.model, {1});
  EXPECT_FALSE(sequences.Again(lost).ok());  // stage 0 has nothing to give
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  lost.begin = 0;
  ASSERT_EQ(sequences.Again(lost), absl::OkStatus());
  ASSERT_EQ(sequences.Decode(kRest), absl::OkStatus());
  EXPECT_EQ(sequences.Take(), undisturbed);
}

// Workers in this process that have memory of their own for what outlives them.
class KeptMemories : public testing::Test {
 protected:
  KeptMemories() {
    for (int i = 0; i < kStages + 1; ++i) memories_.push_back(memfd_create("test", MFD_CLOEXEC));
  }
  ~KeptMemories() override {
    workers_.clear();
    for (const int memory : memories_) close(memory);
  }
  void StartWorker(int number, const std::string& listen = "127.0.0.1:0") {
    WorkerOptions worker = ClusterOptions::QuietWorker();
    worker.listen = listen;
    worker.model_path = options_.model;
    worker.memory = memories_[number];
    worker.pipeline = [this](
                          const PipelineRequest& request,
                          Rendezvous& rendezvous) -> absl::StatusOr<std::unique_ptr<Communicator>> {
      if (gate_shut_) return absl::InternalError("the gate is shut");
      return GlooPipeline("lo")(request, rendezvous);
    };
    ASSERT_OK_AND_ASSIGN(auto started, Worker::Start(worker));
    workers_.resize(std::max<size_t>(workers_.size(), number + 1));
    workers_[number] = std::move(started);
  }
  // An engine of the first three; the fourth is a spare.
  std::unique_ptr<RemoteEngine> StartEngine() {
    std::vector<std::string> addresses;
    for (int number = 0; number < kStages; ++number) {
      StartWorker(number);
      addresses.push_back(workers_[number]->address());
    }
    auto options = EngineOptionsFor(options_, addresses).value();
    return RemoteEngine::Create(std::move(options)).value();
  }
  // Its address.
  std::string Lose(int number) {
    const std::string address = workers_[number]->address();
    workers_[number].reset();
    return address;
  }
  // Another worker takes the place of one that was killed, or, as WorkerSupervisor has it, of one
  // that crashed.
  void Replace(int number, bool crashed) {
    const std::string address = Lose(number);
    if (crashed) {
      ASSERT_EQ(ftruncate(memories_[number], 0), 0);
    }
    StartWorker(number, address);
  }

  ClusterOptions options_ = ThreeStages(WireType::kF32);
  std::vector<int> memories_;
  std::atomic<bool> gate_shut_ = false;  // no epoch comes to stand
  std::vector<std::unique_ptr<Worker>> workers_;
};

TEST_F(KeptMemories, NobodyRunsAgainWhatASuccessorFinds) {
  EngineClient client(StartEngine());
  TwoSequences sequences(client);
  ASSERT_EQ(sequences.Begin(), absl::OkStatus());
  ASSERT_EQ(sequences.Decode(kRest), absl::OkStatus());
  const auto undisturbed = sequences.Take();
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  EXPECT_EQ(client.engine().TakeLost(), StageRange());  // no worker was lost: who knows
  ASSERT_EQ(sequences.Begin(), absl::OkStatus());
  for (const int victim : {1, 0, 2}) {
    StartWorker(victim, Lose(victim));
    EXPECT_FALSE(client.WaitForError().ok());
    ASSERT_EQ(client.Recover(), absl::OkStatus());
    EXPECT_TRUE(client.engine().TakeLost().empty());
    ASSERT_EQ(sequences.Again(kNoStages), absl::OkStatus());
  }
  ASSERT_EQ(sequences.Decode(kRest), absl::OkStatus());
  EXPECT_EQ(sequences.Take(), undisturbed);
}

TEST_F(KeptMemories, WhatAnEarlierEpochLeftIsLost) {
  StartWorker(kStages);
  options_.engine.spares = {workers_[kStages]->address()};
  EngineClient client(StartEngine());
  TwoSequences sequences(client);
  ASSERT_EQ(client.WaitForRoom(), absl::OkStatus());
  client.engine().TakeLost();
  ASSERT_EQ(sequences.Begin(), absl::OkStatus());
  const std::string first = Lose(1);
  EXPECT_FALSE(client.WaitForError().ok());
  ASSERT_EQ(client.Recover(), absl::OkStatus());  // with the spare, whose memory is new
  EXPECT_EQ(client.engine().TakeLost(), (StageRange{1, 2}));
  StartWorker(1, first);
  Lose(kStages);
  EXPECT_FALSE(client.WaitForError().ok());
  ASSERT_EQ(client.Recover(), absl::OkStatus());  // with the first, whose memory is of an epoch ago
  EXPECT_EQ(client.engine().TakeLost(), (StageRange{1, 2}));
}

// Orders of four events between two epochs that run, each third of all (3 and 4 have no common
// factor: every event comes at every place): a worker is killed or crashes, an epoch
// begins in vain, an epoch stands and some of what is missing is computed again.
TEST_F(KeptMemories, NothingThatWasLostIsEverTakenForHeld) {
  enum Event { kKill, kCrash, kBeginInVain, kStand, kEvents };
  constexpr int kDepth = 4;
  constexpr int kVictim = 1;
  EngineClient client(StartEngine());
  TwoSequences sequences(client);
  ASSERT_EQ(sequences.Begin(), absl::OkStatus());
  ASSERT_EQ(sequences.Decode(kRest), absl::OkStatus());
  const auto undisturbed = sequences.Take();
  int recomputed = 0;
  int tried = 0;
  int orders = 1;
  for (int i = 0; i < kDepth; ++i) orders *= kEvents;
  // A sanitizer takes a minute for each seventh.
  for (int order = 0; order < orders; order += kInstrumented ? 7 : 3) {
    std::string told;
    ++tried;
    ASSERT_EQ(client.Recover(), absl::OkStatus());
    client.engine().TakeLost();
    ASSERT_EQ(sequences.Begin(), absl::OkStatus());
    StageRange missing = kNoStages;
    const auto stand = [&] {
      ASSERT_EQ(client.Recover(), absl::OkStatus());
      missing = missing.Around(client.engine().TakeLost());
    };
    for (int i = 0, rest = order; i < kDepth; ++i, rest /= kEvents) {
      const auto event = static_cast<Event>(rest % kEvents);
      told += "KCBS"[event];
      if (event == kKill || event == kCrash) Replace(kVictim, event == kCrash);
      if (event == kBeginInVain) {
        gate_shut_ = true;
        client.engine().Restart();
        EXPECT_FALSE(client.WaitForRoom().ok());
        gate_shut_ = false;
      }
      if (event == kStand) {
        stand();
        ASSERT_EQ(sequences.SomeAgain(missing), absl::OkStatus()) << told;
      }
    }
    stand();
    recomputed += missing.empty() ? 0 : 1;
    ASSERT_EQ(sequences.Again(missing), absl::OkStatus()) << told;
    ASSERT_EQ(sequences.Decode(kRest), absl::OkStatus()) << told;
    EXPECT_EQ(sequences.Take(), undisturbed) << told;
  }
  // A kill alone costs nothing, whatever begins in vain before it.
  EXPECT_LT(recomputed, tried);
}

TEST(KeptMemory, HasWhatWasKeptForTheSame) {
  const int file = memfd_create("test", MFD_CLOEXEC);
  const auto open = [&](const char* what) { return *KeptMemory::Open(file, what); };
  uint64_t number = 0;
  {
    const auto memory = open("one");
    EXPECT_EQ(memory->identity().number, 0);
    number = memory->identity().For(7);
    EXPECT_NE(number, 0);
    memory->Take(5000)->data()[4999] = std::byte{1};
    memory->Take(100)->data()[99] = std::byte{2};
  }
  {
    const auto memory = open("one");
    EXPECT_EQ(memory->identity().For(7), number);
    EXPECT_EQ(memory->Take(5000)->data()[4999], std::byte{1});
    EXPECT_EQ(memory->Take(100)->data()[99], std::byte{2});
  }
  {
    const auto memory = open("another");
    EXPECT_EQ(memory->identity().number, 0);
    EXPECT_EQ(memory->Take(5000)->data()[4999], std::byte{0});
    number = memory->identity().For(7);
  }
  ASSERT_EQ(ftruncate(file, 0), 0);  // as after a crash
  const uint64_t emptied = open("another")->identity().For(7);
  EXPECT_NE(emptied, number);
  EXPECT_NE(open("another")->identity().For(8), emptied);  // another master's
  EXPECT_NE(open("another")->identity().For(7), emptied);  // which had it meanwhile
  close(file);
  EXPECT_FALSE(KeptMemory::Open(file, "one").ok());
}

TEST(RemoteReplay, APlanThatLeavesTheLastStageOutGivesNothing) {
  ASSERT_OK_AND_ASSIGN(auto cluster, StartProcessCluster(ThreeStages(WireType::kF32)));
  EngineClient client(std::move(cluster.engine));
  ASSERT_EQ(client.WaitForRoom(), absl::OkStatus());
  client.engine().Submit(PlanOf()
                             .Stages({0, 2})
                             .Start(StartOf(1, kShort, {0}))
                             .Step(SampleOf(StepOf(1, 0, Ids(kShort, 3)))));
  EXPECT_THAT(client.Next().status().message(), HasSubstr("which the last is not among"));
}

}  // namespace
}  // namespace treadle
