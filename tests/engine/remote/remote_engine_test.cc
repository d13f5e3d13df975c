#include "engine/remote/remote_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>

#include "models/checkpoints/write/quantize_checkpoint.h"
#include "tests/engine/plan_builder.h"
#include "tests/engine/remote/driven_requests.h"
#include "tests/support/assert_ok.h"
#include "tests/support/ranks/remote_cluster.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

std::string TinyModel(int64_t layers = 4) {
  TinyModelOptions options;
  options.layers = layers;
  const auto path = WriteTinyLlamaGguf(OwnFolder().path(), options);
  EXPECT_TRUE(path.ok()) << path.status();
  return *path;
}

ClusterOptions TinyCluster(int stages) {
  ClusterOptions options;
  options.model = TinyModel();
  options.stages = stages;
  return options;
}

// The same random plans through LocalEngine and through the cluster.
void ExpectLocalAnswers(std::unique_ptr<Engine> remote, const std::string& model, uint32_t seed) {
  const auto requests = SomeRequests(10, seed);
  PlanDriver local_driver(DriverOptions(seed), requests);
  ASSERT_OK_AND_ASSIGN(auto local, MakeLocalEngine(model, 1));
  ASSERT_EQ(EngineClient(std::move(local)).Run(local_driver), absl::OkStatus());
  PlanDriver remote_driver(DriverOptions(seed + 1, remote->stages()), requests);
  ASSERT_EQ(EngineClient(std::move(remote)).Run(remote_driver), absl::OkStatus());
  EXPECT_EQ(DifferentAnswers(local_driver, remote_driver, requests), "");
}

TEST(RemoteEngine, OneToFourStagesGiveLocalAnswersBitForBit) {
  for (int stages = 1; stages <= 4; ++stages) {
    SCOPED_TRACE(Str(stages, " stages"));
    const ClusterOptions options = TinyCluster(stages);
    ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(options));
    EXPECT_EQ(cluster.engine->stages(), stages);
    EXPECT_EQ(cluster.engine->kv_pages(), 64);
    ExpectLocalAnswers(std::move(cluster.engine), options.model, 10 + stages);
  }
}

// Nothing is known of a worker's own file: its tensors come from the master, quantized ones with
// their constants.
TEST(RemoteEngine, WeightsFromTheMasterGiveLocalAnswersBitForBit) {
  ClusterOptions options = TinyCluster(2);
  options.engine.weights_from_master = true;
  ASSERT_OK_AND_ASSIGN(const auto folder, WriteTinyLlamaFolder(OwnFolder().path(), {}));
  const std::string nf4 = OwnFolder() / "tiny-nf4";
  std::filesystem::remove_all(nf4);
  QuantizeOptions quantize;
  quantize.weights = *WeightPlan::Parse("nf4");
  quantize.version = "test";
  ASSERT_TRUE(QuantizeCheckpoint(folder, nf4, quantize).ok());
  for (const std::string& model : {options.model, folder, nf4}) {
    options.model = model;
    auto cluster = StartThreadCluster(options);
    ASSERT_TRUE(cluster.ok()) << model << ": " << cluster.status();
    ExpectLocalAnswers(std::move(cluster->engine), model, 5);
  }
}

// Ranks of a stage load from threads of their own.
TEST(RemoteEngine, WeightsFromTheMasterReachEveryRank) {
  const auto requests = SomeRequests(8, 6);
  std::vector<std::unique_ptr<PlanDriver>> drivers;
  for (const bool from_master : {false, true}) {
    ClusterOptions options = TinyCluster(2);
    options.engine.tensor_parallel = 2;
    options.engine.weights_from_master = from_master;
    ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(options));
    drivers.push_back(std::make_unique<PlanDriver>(DriverOptions(7, 2), requests));
    EngineClient client(std::move(cluster.engine));
    ASSERT_EQ(client.Run(*drivers.back()), absl::OkStatus());
  }
  EXPECT_EQ(DifferentAnswers(*drivers[0], *drivers[1], requests), "");
}

TEST(RemoteEngine, UnixSocketsServeToo) {
  ClusterOptions options = TinyCluster(1);
  options.worker.listen = "unix:" + OwnFolder() / "worker.socket";
  ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(options));
  ExpectLocalAnswers(std::move(cluster.engine), options.model, 4);
}

// Each stage split over two ranks: the placement of layers changes nothing.
TEST(RemoteEngine, TensorParallelStagesGiveTheAnswersOfOneSuchStage) {
  const auto requests = SomeRequests(8, 6);
  std::vector<std::unique_ptr<PlanDriver>> drivers;
  for (const int stages : {1, 2}) {
    ClusterOptions options = TinyCluster(stages);
    options.engine.tensor_parallel = 2;
    ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(options));
    drivers.push_back(std::make_unique<PlanDriver>(DriverOptions(7, 2), requests));
    EngineClient client(std::move(cluster.engine));
    ASSERT_EQ(client.Run(*drivers.back()), absl::OkStatus());
  }
  EXPECT_EQ(DifferentAnswers(*drivers[0], *drivers[1], requests), "");
}

TEST(RemoteEngine, WorkerProcessesGiveLocalAnswersBitForBit) {
  const ClusterOptions options = TinyCluster(2);
  ASSERT_OK_AND_ASSIGN(auto cluster, StartProcessCluster(options));
  ExpectLocalAnswers(std::move(cluster.engine), options.model, 3);
}

IterationPlan OneRequest(uint64_t epoch, uint64_t iteration, SequenceId id = 1) {
  return PlanOf(epoch, iteration)
      .Start(StartOf(id, 3, {0}))
      .Step(SampleOf(StepOf(id, 0, {1, 2, 3})));
}

TEST(RemoteEngine, ABadPlanEndsTheEpochAndRestartRecovers) {
  ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(TinyCluster(2)));
  EngineClient client(std::move(cluster.engine));
  Engine& engine = client.engine();
  EXPECT_EQ(engine.depth(), 2);
  ASSERT_TRUE(engine.HasRoom());
  engine.Submit(OneRequest(engine.epoch(), 0));
  EXPECT_TRUE(client.Next().ok());
  engine.Submit(PlanOf(engine.epoch(), 1).Step(StepOf(77, 0, {1})));
  const absl::Status error = client.WaitForError();
  EXPECT_EQ(error.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(error.message(), HasSubstr("iteration 1 of epoch 1: step of unknown sequence 77"));
  EXPECT_FALSE(engine.HasRoom());
  engine.Submit(PlanOf(engine.epoch(), 2));  // the epoch is over: ignored
  EXPECT_TRUE(engine.TakeResults().empty());
  engine.Restart();
  EXPECT_EQ(client.WaitForRoom(), absl::OkStatus());
  EXPECT_EQ(engine.epoch(), 2u);
  engine.Submit(OneRequest(engine.epoch(), 0));  // the same id again: the tables are empty
  EXPECT_TRUE(client.Next().ok());
}

TEST(RemoteEngine, RestartDropsWhatIsUnderWay) {
  ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(TinyCluster(2)));
  EngineClient client(std::move(cluster.engine));
  Engine& engine = client.engine();
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(client.WaitForRoom(), absl::OkStatus());
    engine.Submit(OneRequest(engine.epoch(), 0, 1));
    engine.Submit(OneRequest(engine.epoch(), 1, 2));
    engine.Restart();
    EXPECT_TRUE(engine.TakeResults().empty());
  }
  ASSERT_EQ(client.WaitForRoom(), absl::OkStatus());
  engine.Submit(OneRequest(engine.epoch(), 0));
  ASSERT_OK_AND_ASSIGN(const auto result, client.Next());
  EXPECT_EQ(result.epoch, engine.epoch());
}

TEST(RemoteEngine, TracesShowAllStagesAndRanks) {
  ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(TinyCluster(2)));
  EngineClient client(std::move(cluster.engine));
  client.engine().SetTracing(true);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::set<std::pair<int, std::string_view>> seen;
  for (uint64_t i = 0; seen.size() < 6 && std::chrono::steady_clock::now() < deadline; ++i) {
    client.engine().Submit(OneRequest(client.engine().epoch(), i, i + 1));
    ASSERT_TRUE(client.Next().ok());
    ++i;
    client.engine().Submit(PlanOf(client.engine().epoch(), i).Release(i));
    ASSERT_TRUE(client.Next().ok());
    for (const TraceEvent& event : client.engine().TakeTrace()) {
      EXPECT_LE(event.begin, event.end);
      seen.emplace(event.stage, event.name());
    }
  }
  EXPECT_THAT(seen,
              testing::IsSupersetOf(std::vector<std::pair<int, std::string_view>>{{0, "plan"},
                                                                                  {0, "forward"},
                                                                                  {0, "send"},
                                                                                  {1, "receive"},
                                                                                  {1, "forward"},
                                                                                  {1, "sample"}}));
}

// The baseline: a stage hears of an iteration once the one before it has run it.
TEST(RemoteEngine, LatePlansArriveBehindTheActivations) {
  ClusterOptions options = TinyCluster(2);
  options.engine.late_plans = true;
  ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(options));
  EngineClient client(std::move(cluster.engine));
  client.engine().SetTracing(true);
  std::map<uint64_t, int64_t> sent, arrived;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  int both = 0;
  for (uint64_t i = 0; both < 30 && std::chrono::steady_clock::now() < deadline; i += 2) {
    client.engine().Submit(OneRequest(client.engine().epoch(), i, i + 1));
    client.engine().Submit(PlanOf(client.engine().epoch(), i + 1).Release(i + 1));
    ASSERT_TRUE(client.Next().ok());
    ASSERT_TRUE(client.Next().ok());
    for (const TraceEvent& event : client.engine().TakeTrace()) {
      if (event.stage == 0 && event.name() == "send") sent[event.iteration] = event.end;
      if (event.stage == 1 && event.name() == "plan") arrived[event.iteration] = event.begin;
    }
    both = 0;
    for (const auto& [iteration, time] : arrived) both += sent.contains(iteration);
  }
  EXPECT_GE(both, 30);
  for (const auto& [iteration, time] : arrived) {
    if (sent.contains(iteration)) {
      EXPECT_GE(time, sent[iteration]) << iteration;
    }
  }
}

TEST(RemoteEngine, PagesAreThoseOfTheTightestStage) {
  ClusterOptions options = TinyCluster(3);  // of 4 layers: 1, 1, 2
  options.engine.kv_pages = 0;
  // A page of a layer: K and V, 16 slots, 2 heads of 16 floats.
  constexpr int64_t kPageOfALayer = 2 * 16 * 2 * 16 * 4;
  options.engine.kv_memory = 40 * kPageOfALayer;
  ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(options));
  EXPECT_EQ(cluster.engine->kv_pages(), 20);
  options.engine.kv_memory = 4 * kPageOfALayer;
  const absl::Status too_few = StartThreadCluster(options).status();
  EXPECT_EQ(too_few.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(too_few.message(), HasSubstr("stage 0"));
  options.engine.kv_memory = int64_t{1} << 50;
  const absl::Status too_many = StartThreadCluster(options).status();
  EXPECT_EQ(too_many.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(too_many.message(), HasSubstr("stage 0"));
  EXPECT_THAT(too_many.message(), HasSubstr("--kv-memory is 1073741824M, but the memory "));
}

}  // namespace
}  // namespace treadle
