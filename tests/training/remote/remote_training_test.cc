// Training through workers: losses and adapter are, bit for bit, those of a run in one process,
// whoever else trains or generates there, and whatever is lost meanwhile.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "tests/engine/remote/driven_requests.h"
#include "tests/support/faults/fault_proxy.h"
#include "tests/support/file_sum.h"
#include "tests/support/identifier.h"
#include "tests/training/remote/train_through.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

// A cluster whose stages are loaded, and its serving side.
struct Serving {
  std::vector<std::unique_ptr<Worker>> workers;
  std::unique_ptr<EngineClient> client;
};
Serving Serve(const ClusterOptions& options) {
  auto cluster = StartThreadCluster(options).value();
  Serving serving{std::move(cluster.workers),
                  std::make_unique<EngineClient>(std::move(cluster.engine))};
  EXPECT_EQ(serving.client->WaitForRoom(), absl::OkStatus());
  return serving;
}

void ExpectAlike(const absl::StatusOr<RunResult>& run, const absl::StatusOr<RunResult>& expected) {
  ASSERT_TRUE(run.ok()) << run.status();
  ASSERT_TRUE(expected.ok()) << expected.status();
  EXPECT_EQ(run->losses, expected->losses);
  EXPECT_EQ(run->values, expected->values);
}

TEST(RemoteTraining, HasTheBitsOfOneProcess) {
  const std::string model = TinyModel({.format = "q4_1", .layers = 5});
  const std::string sum = FileSha256(model);
  const auto expected = Train(model, SmallRun());
  EXPECT_NE(expected->losses.front(), expected->losses.back());
  for (const int workers : {1, 2, 3}) {
    SCOPED_TRACE(workers);
    std::vector<std::unique_ptr<Worker>> some;
    for (int i = 0; i < workers; ++i) some.push_back(TrainingWorker(model));
    ExpectAlike(TrainThrough(model, SmallRun(), AddressesOf(some)), expected);
  }
  EXPECT_EQ(FileSha256(model), sum);
}

// Packed weights that a stage serves with are those that exact arithmetic trains over.
class ServedFormatTest : public testing::TestWithParam<std::tuple<const char*, ComputeMode>> {};
INSTANTIATE_TEST_SUITE_P(Formats, ServedFormatTest,
                         testing::Combine(testing::Values("", "bf16", "f16", "q8_0", "q4_1", "q4_k",
                                                          "iq4_nl", "nf4", "int8", "fp8",
                                                          "kbit-int4:64"),
                                          testing::Values(ComputeMode::kAuto, ComputeMode::kExact)),
                         [](const auto& info) {
                           return Identifier(Str("weights-", std::get<0>(info.param), "-",
                                                 Name(std::get<1>(info.param))));
                         });

TEST_P(ServedFormatTest, IsTrainedOver) {
  const auto& [weights, compute] = GetParam();
  const std::string model = TinyModel({.layers = 2, .hidden = 256, .ffn_hidden = 256});
  TrainingOptions options = SmallRun();
  options.optimizer.steps = 2;
  options.weights = *WeightPlan::Parse(weights);
  ClusterOptions cluster = TrainingCluster(model, 1);
  cluster.engine.compute = compute;
  cluster.engine.weights = weights;
  const Serving serving = Serve(cluster);
  const auto run = TrainThrough(model, options, AddressesOf(serving.workers));
  if (absl::IsUnimplemented(run.status())) {  // a codebook that this machine's kernels round
    EXPECT_EQ(compute, ComputeMode::kAuto);
    EXPECT_THAT(run.status().message(), HasSubstr("has rounded, expected exact"));
    EXPECT_THAT(weights, testing::AnyOf("fp8"));
    return;
  }
  ExpectAlike(run, Train(model, options));
}

// Two clients, with updates of their own, train on the stages that a third generates with.
TEST(RemoteTraining, ClientsDoNotDisturbEachOther) {
  const std::string model = TinyModel();
  const std::string sum = FileSha256(model);
  TrainingOptions options[] = {SmallRun(1), SmallRun(2)};
  options[1].lora = {.rank = 3, .alpha = 5, .targets = "q,v,down"};
  options[1].batch_size = 3;
  const auto requests = SomeRequests(6, 1);
  PlanDriver expected(DriverOptions(1), requests);
  EXPECT_EQ(EngineClient(*MakeLocalEngine(model, 1)).Run(expected), absl::OkStatus());

  const Serving serving = Serve(TrainingCluster(model, 2));
  std::atomic<int> training = 2;
  absl::StatusOr<RunResult> runs[2];
  std::vector<std::thread> clients;
  for (int i = 0; i < 2; ++i) {
    clients.emplace_back([&, i] {
      runs[i] = TrainThrough(model, options[i], AddressesOf(serving.workers));
      --training;
    });
  }
  int generated = 0;
  for (uint32_t seed = 2; training > 0 || generated == 0; ++seed, ++generated) {
    PlanDriver driver(DriverOptions(seed, 2), requests);
    EXPECT_EQ(serving.client->Run(driver), absl::OkStatus());
    EXPECT_EQ(DifferentAnswers(expected, driver, requests), "");
    // The driver's cache is its own, and so is the engine's epoch.
    EXPECT_EQ(serving.client->Recover(), absl::OkStatus());
  }
  for (std::thread& client : clients) client.join();
  for (int i = 0; i < 2; ++i) ExpectAlike(runs[i], Train(model, options[i]));
  EXPECT_EQ(FileSha256(model), sum);
}

TEST(RemoteTraining, AKilledWorkerCostsTheStep) {
  const std::string model = TinyModel();
  std::unique_ptr<WorkerProcess> first, second;
  first = std::make_unique<WorkerProcess>(ClusterOptions::QuietWorker().listen, model);
  second = std::make_unique<WorkerProcess>(ClusterOptions::QuietWorker().listen, model);
  const std::string address = second->address();
  ASSERT_NE(first->address(), "");
  ASSERT_NE(address, "");
  std::promise<void> third;
  auto run = std::async(std::launch::async, [&] {
    return TrainThrough(model, SmallRun(), {first->address(), address}, [&](int64_t done) {
      if (done == 3) third.set_value();
    });
  });
  ASSERT_EQ(third.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  second->Kill();  // while the fourth step runs, or before
  second = std::make_unique<WorkerProcess>(address, model);
  EXPECT_EQ(second->address(), address);
  ExpectAlike(run.get(), Train(model, SmallRun()));
}

// A connection that breaks, wherever that is in a step.
class BrokenStepTest : public testing::TestWithParam<MessageFault> {};
INSTANTIATE_TEST_SUITE_P(
    Messages, BrokenStepTest,
    testing::Values(
        MessageFault{MessageFault::Kind::kCut, MessageFault::Where::kToWorker, "step", 2},
        MessageFault{MessageFault::Kind::kCut, MessageFault::Where::kToWorker, "forward", 5},
        MessageFault{MessageFault::Kind::kCut, MessageFault::Where::kToWorker, "backward", 3},
        MessageFault{MessageFault::Kind::kCut, MessageFault::Where::kToWorker, "collect", 1},
        MessageFault{MessageFault::Kind::kCut, MessageFault::Where::kFromWorker, "stage", 1},
        MessageFault{MessageFault::Kind::kCut, MessageFault::Where::kFromWorker, "hidden", 6},
        MessageFault{MessageFault::Kind::kCut, MessageFault::Where::kFromWorker, "gradients", 2}),
    [](const auto& info) { return Identifier(info.param.message); });

TEST_P(BrokenStepTest, RunsAgain) {
  const std::string model = TinyModel();
  const auto first = TrainingWorker(model), second = TrainingWorker(model);
  const auto proxy = *FaultProxy::Start(second->address());
  proxy->Inject(GetParam());
  ExpectAlike(TrainThrough(model, SmallRun(), {first->address(), proxy->address()}),
              Train(model, SmallRun()));
  EXPECT_EQ(proxy->happened(), 1);
}

TEST(RemoteTraining, AStepWithoutAnAnswerRunsAgain) {
  const std::string model = TinyModel();
  const auto worker = TrainingWorker(model);
  const auto proxy = *FaultProxy::Start(worker->address());
  // An answer that is late holds up what the worker says behind it.
  proxy->Inject({MessageFault::Kind::kDelay, MessageFault::Where::kFromWorker, "hidden", 3,
                 std::chrono::milliseconds(2500)});
  RemoteLayersOptions client = ClientOf(model, SmallRun(), {proxy->address()});
  client.silence = std::chrono::milliseconds(1500);
  ExpectAlike(Train(model, Through(client, SmallRun())), Train(model, SmallRun()));
  EXPECT_EQ(proxy->happened(), 1);
}

// A master takes the worker, with its layers, from clients, who go on with the master's stage.
TEST(RemoteTraining, GoesOnWithTheStageOfAMasterThatComes) {
  const std::string model = TinyModel();
  ClusterOptions cluster = TrainingCluster(model, 1);
  std::vector<std::unique_ptr<Worker>> workers;
  workers.push_back(TrainingWorker(model));
  auto engine = EngineOptionsFor(cluster, AddressesOf(workers));
  std::unique_ptr<EngineClient> serving;
  const auto run = TrainThrough(model, SmallRun(), AddressesOf(workers), [&](int64_t done) {
    if (done != 3) return;
    serving = std::make_unique<EngineClient>(*RemoteEngine::Create(*std::move(engine)));
    EXPECT_EQ(serving->WaitForRoom(), absl::OkStatus());
  });
  ExpectAlike(run, Train(model, SmallRun()));
  const auto requests = SomeRequests(3, 1);
  PlanDriver expected(DriverOptions(1), requests), driver(DriverOptions(2, 1), requests);
  EXPECT_EQ(EngineClient(*MakeLocalEngine(model, 1)).Run(expected), absl::OkStatus());
  EXPECT_EQ(serving->Run(driver), absl::OkStatus());
  EXPECT_EQ(DifferentAnswers(expected, driver, requests), "");
}

// Layers that a worker has loaded for clients who are gone are no stage that it keeps.
TEST(RemoteTraining, SharesLayersAnewWithOtherWorkers) {
  const std::string model = TinyModel();
  const auto first = TrainingWorker(model), second = TrainingWorker(model);
  const auto expected = Train(model, SmallRun());
  ExpectAlike(TrainThrough(model, SmallRun(), {first->address()}), expected);
  ExpectAlike(TrainThrough(model, SmallRun(), {second->address(), first->address()}), expected);
}

// Batches that run in slices, of one sequence that is too long for a slice and of several that are
// not; for them there has to be more room while another client trains.
TEST(RemoteTraining, CutsBatchesIntoSlices) {
  const std::string model = TinyModel({.layers = 4, .context = 512});
  const auto worker = TrainingWorker(model);
  TrainingOptions large = SmallRun(3);
  large.batch_size = 5;
  large.max_length = FrozenLayers::kSliceTokens + 44;
  large.optimizer.steps = 3;
  absl::StatusOr<RunResult> second;
  const auto first = TrainThrough(model, SmallRun(), {worker->address()}, [&](int64_t done) {
    if (done == 3) second = TrainThrough(model, large, {worker->address()});
  });
  ExpectAlike(first, Train(model, SmallRun()));
  ExpectAlike(second, Train(model, large));
}

}  // namespace
}  // namespace treadle
