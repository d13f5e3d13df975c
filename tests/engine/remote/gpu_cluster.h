// Stages on emulated GPUs, which are slow: tiny models, few tokens.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/op_cases/instrumented.h"
#include "tests/engine/plan_builder.h"
#include "tests/engine/remote/driven_requests.h"
#include "tests/support/emulated_gpus.h"
#include "tests/support/ranks/forwarding_communicator.h"
#include "tests/support/ranks/one_rank.h"
#include "tests/support/ranks/remote_cluster.h"

namespace treadle {

inline constexpr uint32_t kSeed = 5;

inline std::string TinyModel(const TinyModelOptions& options = {.layers = 3}) {
  const auto path = WriteTinyLlamaGguf(OwnFolder().path(), options);
  EXPECT_TRUE(path.ok()) << path.status();
  return *path;
}

inline std::vector<PlanDriver::DrivenRequest> FewRequests() {
  auto requests = SomeRequests(5, kSeed);
  for (PlanDriver::DrivenRequest& driven : requests) {
    driven.request.prompt.resize(std::min<size_t>(driven.request.prompt.size(), 19));
    driven.request.max_new_tokens = std::min(driven.request.max_new_tokens, 5);
  }
  return requests;
}

inline ClusterOptions GpuCluster(int stages, int ranks = 1) {
  ClusterOptions options;
  options.model = TinyModel();
  options.stages = stages;
  options.engine.tensor_parallel = ranks;
  options.engine.backend = "cuda";
  options.engine.dtype = DType::kBF16;
  options.engine.deterministic = true;
  options.engine.compute = ComputeMode::kAuto;
  options.engine.iteration_deadline = options.engine.silence =
      std::chrono::minutes(kInstrumented ? 10 : 1);
  options.worker.ranks.gpus = EmulatedGpus(2);
  return options;
}

// All layers on one emulated GPU, in this process.
inline std::unique_ptr<Engine> OneGpu(const ClusterOptions& options) {
  auto backend = EmulatedGpu(0, options.engine.dtype);
  auto checkpoint = Checkpoint::Open(options.model);
  TREADLE_CHECK(backend.ok() && checkpoint.ok());
  LoadOptions load;
  load.max_batch_tokens = options.engine.max_batch_tokens;
  auto model = Model::Load(**checkpoint, **backend, load);
  TREADLE_CHECK(model.ok());
  auto engine = OneRankEngine(*std::move(backend), *std::move(model),
                              {.max_batch_tokens = options.engine.max_batch_tokens,
                               .page_size = options.engine.page_size,
                               .kv_pages = options.engine.kv_pages,
                               .kv_dtype = options.engine.kv_dtype,
                               .depth = 2});
  TREADLE_CHECK(engine.ok());
  return *std::move(engine);
}

using Requests = std::vector<PlanDriver::DrivenRequest>;

inline void RunOn(EngineClient& client, PlanDriver& driver) {
  ASSERT_EQ(client.Run(driver), absl::OkStatus());
}

// Answers of a cluster to requests in one company.
inline std::unique_ptr<PlanDriver> AnswersOf(const ClusterOptions& options,
                                             const Requests& requests) {
  auto cluster = StartThreadCluster(options);
  TREADLE_CHECK(cluster.ok());
  auto driver = std::make_unique<PlanDriver>(DriverOptions(7, 2), requests);
  EngineClient client(std::move(cluster->engine));
  RunOn(client, *driver);
  return driver;
}

// Through the cluster, in another company than one GPU runs them in, and again after a restart.
inline void ExpectTheBitsOfOneGpu(const ClusterOptions& options) {
  const Requests requests = FewRequests();
  PlanDriver expected(DriverOptions(1), requests);
  EngineClient one(OneGpu(options));
  RunOn(one, expected);
  auto cluster = StartThreadCluster(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_THAT(cluster->engine->backend(), testing::HasSubstr("cuda emulated"));
  EngineClient client(std::move(cluster->engine));
  for (const uint32_t company : {2, 3}) {
    PlanDriver driver(DriverOptions(company, options.stages), requests);
    RunOn(client, driver);
    EXPECT_EQ(DifferentAnswers(expected, driver, requests), "");
    ASSERT_EQ(client.Recover(), absl::OkStatus());
  }
}

// Cannot send a second time.
class SendsOnce final : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  absl::StatusOr<Transfer> Send(const void* data, size_t bytes, int to) override {
    if (std::exchange(sent_, true)) return absl::InternalError("no second one");
    return ForwardingCommunicator::Send(data, bytes, to);
  }

 private:
  bool sent_ = false;
};

// A prompt of three tokens and one sample.
inline IterationPlan OneRequest(uint64_t epoch, uint64_t iteration) {
  return PlanOf(epoch, iteration)
      .Start(StartOf(iteration + 1, 3, {static_cast<int32_t>(iteration)}))
      .Step(SampleOf(StepOf(iteration + 1, 0, {1, 2, 3})));
}

}  // namespace treadle
