// Stages on GPUs: the bits of one GPU, over every wire; what a worker without the right GPUs is
// told. The GPUs are emulated, and slow: tiny models, few tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "engine/remote/worker/worker_epoch.h"
#include "tests/emulation/emulated_device.h"
#include "tests/engine/remote/gpu_cluster.h"
#include "tests/support/ranks/forwarding_communicator.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

TEST(RemoteGpus, StagesGiveTheBitsOfOneGpu) {
  for (const int stages : {1, 2, 3}) {
    SCOPED_TRACE(Str(stages, " stages"));
    ExpectTheBitsOfOneGpu(GpuCluster(stages));
  }
}

// A device that does everything as late as it may: rows that are sent or received too early, or
// overwritten while they are copied, are other rows.
TEST(RemoteGpus, AlsoWhereWorkRunsLate) {
  const cuda::ScopedEmulation late({.deferred = true});
  ExpectTheBitsOfOneGpu(GpuCluster(3));
}

// An epoch ends while the first stage has begun one more plan: what is on its way may not write to
// buffers that are gone.
TEST(RemoteGpus, EpochsEndUnderLateWork) {
  const cuda::ScopedEmulation late({.deferred = true});
  ClusterOptions options = GpuCluster(2);
  options.engine.depth = 4;
  options.worker.pipeline =
      [](const PipelineRequest& request,
         Rendezvous& rendezvous) -> absl::StatusOr<std::unique_ptr<Communicator>> {
    auto inner = GlooPipeline("lo")(request, rendezvous);
    if (!inner.ok() || request.rank != 0 || request.epoch % 2 == 0) return inner;
    return std::make_unique<SendsOnce>(*std::move(inner));
  };
  auto cluster = StartThreadCluster(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EngineClient client(std::move(cluster->engine));
  Engine& engine = client.engine();
  for (int round = 0; round < 10; ++round) {
    ASSERT_EQ(client.WaitForRoom(), absl::OkStatus());
    const bool fails = engine.epoch() % 2 == 1;
    for (uint64_t i = 0; i < 4; ++i) engine.Submit(OneRequest(engine.epoch(), i));
    if (fails) {
      EXPECT_FALSE(client.WaitForError().ok());
    } else {
      for (int i = 0; i < 4; ++i) EXPECT_TRUE(client.Next().ok());
    }
    ASSERT_EQ(client.Recover(), absl::OkStatus());
  }
}

TEST(RemoteGpus, EveryTypeOfCacheAndProducts) {
  ClusterOptions options = GpuCluster(2);
  options.engine.kv_dtype = DType::kBF16;
  ExpectTheBitsOfOneGpu(options);
  options.engine.kv_dtype = DType::kF16;
  options.engine.dtype = DType::kF16;
  options.engine.weights_from_master = true;
  ExpectTheBitsOfOneGpu(options);
}

// Not the bits of one GPU, but those that a request gets whatever runs beside it.
TEST(RemoteGpus, ShorterWiresAreOfEachRowAlone) {
  for (const WireType wire : {WireType::kBf16, WireType::kInt8}) {
    SCOPED_TRACE(Name(wire));
    const Requests requests = FewRequests();
    ClusterOptions options = GpuCluster(2);
    options.engine.wire = wire;
    auto cluster = StartThreadCluster(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    EngineClient client(std::move(cluster->engine));
    PlanDriver one(DriverOptions(1, 2), requests), other(DriverOptions(2, 2), requests);
    RunOn(client, one);
    ASSERT_EQ(client.Recover(), absl::OkStatus());
    RunOn(client, other);
    EXPECT_EQ(DifferentAnswers(one, other, requests), "");
    PlanDriver exact(DriverOptions(1), requests);
    EngineClient whole(OneGpu(options));
    RunOn(whole, exact);
    EXPECT_NE(DifferentAnswers(exact, one, requests), "") << "rows went as they are";
  }
}

// Ranks have a GPU each, and what they tell each other lies on it. Any number of stages gives the
// same bits; in floats, the best tokens are a CPU's too.
TEST(RemoteGpus, RanksOfStages) {
  const Requests requests = FewRequests();
  const auto answers = [&](ClusterOptions options) {
    options.engine.dtype = DType::kF32;
    return AnswersOf(options, requests);
  };
  const auto one = answers(GpuCluster(1, 2));
  EXPECT_EQ(DifferentAnswers(*one, *answers(GpuCluster(2, 2)), requests), "");
  ClusterOptions cpus = GpuCluster(2, 2);
  cpus.engine.backend = "cpu";
  cpus.engine.compute = ComputeMode::kExact;
  const auto on_cpus = answers(cpus);
  for (size_t i = 0; i < requests.size(); ++i) {
    if (requests[i].request.sampling.temperature > 0) continue;
    EXPECT_EQ(one->answer(i, 0).tokens, on_cpus->answer(i, 0).tokens) << i;
  }
}

// A failing device is an error of its stage.
TEST(RemoteGpus, AFailingDeviceEndsTheEpoch) {
  const cuda::ScopedEmulation failing({.fail_after_launches = 150});
  auto cluster = StartThreadCluster(GpuCluster(2));
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EngineClient client(std::move(cluster->engine));
  PlanDriver driver(DriverOptions(1, 2), FewRequests());
  const absl::Status status = client.Run(driver);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("as the test asked for"));
  EXPECT_THAT(status.message(), HasSubstr("stage "));
  // It stays failed, and no epoch stands on it.
  EXPECT_THAT(client.Recover(1).message(), HasSubstr("as the test asked for"));
}

// Without --kv-memory: nine tenths of what the device has left, and not half of the machine's.
TEST(RemoteGpus, TheCacheIsPlannedFromTheDevicesMemory) {
  constexpr size_t kMemory = size_t{64} << 20;
  const cuda::ScopedEmulation small({.memory_bytes = kMemory});
  ClusterOptions options = GpuCluster(2);
  options.engine.kv_pages = 0;
  options.engine.max_batch_size = 1 << 20;
  const auto cluster = StartThreadCluster(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  // K and V of 16 positions, 2 heads of 16, f32, in the two layers of the larger stage. Two workers
  // that name the same GPU share it.
  const int64_t page = 2 * 16 * 2 * 16 * 4 * 2;
  EXPECT_EQ(cluster->engine->kv_pages(), static_cast<int64_t>(kMemory / 2 * 0.9) / page);
}

absl::Status Refusal(const ClusterOptions& options) {
  const absl::Status status = StartThreadCluster(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(status.message(), HasSubstr("stage 0 ("));
  return status;
}

TEST(RemoteGpus, WorkersThatDoNotFitAreRefused) {
  ClusterOptions options = GpuCluster(1, 2);
  options.worker.ranks.gpus = EmulatedGpus(1);
  EXPECT_THAT(Refusal(options).message(), HasSubstr("its 2 ranks need a GPU each, it has 1"));
  options.worker.ranks.gpus = EmulatedGpus(0);
  EXPECT_THAT(Refusal(options).message(), HasSubstr("it has no GPU: the test has none"));

  options = GpuCluster(1);
  options.worker.device = "cpu";
  EXPECT_THAT(Refusal(options).message(), HasSubstr("runs on cpu, this master wants cuda"));
  options = GpuCluster(1);
  options.worker.dtype = "f32";
  EXPECT_THAT(Refusal(options).message(), HasSubstr("computes in f32, this master wants bf16"));
  options = GpuCluster(1);
  options.worker.deterministic = "off";
  EXPECT_THAT(Refusal(options).message(), HasSubstr("is deterministic: off, this master wants on"));
  // Options of GPUs do not matter on CPUs.
  options.worker.dtype = "f32";
  options.engine.backend = "cpu";
  EXPECT_EQ(StartThreadCluster(options).status(), absl::OkStatus());
  options.worker.device = "cuda";
  EXPECT_THAT(Refusal(options).message(), HasSubstr("runs on cuda, this master wants cpu"));
  options.engine.backend = "abacus";
  options.worker.device = "";
  EXPECT_EQ(StartThreadCluster(options).status().code(), absl::StatusCode::kUnimplemented);
}

// Both sides are named, before anything is loaded.
TEST(RemoteGpus, DataPlanesThatCannotBeAreRefused) {
  ClusterOptions options = GpuCluster(2);
  options.engine.data_plane = DataPlane::kNccl;
  options.worker.ranks.gpus.can_link = [] {
    return absl::FailedPreconditionError("libnccl.so.2 is on another machine");
  };
  std::atomic<bool> created = false;
  options.worker.ranks.gpus.create = [&](auto...) -> absl::StatusOr<std::unique_ptr<Backend>> {
    created = true;
    return Internal("not to be created");
  };
  absl::Status status = StartThreadCluster(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(status.message(), HasSubstr("the master wants activations over nccl, but this worker "
                                          "cannot: libnccl.so.2 is on another machine"));
  EXPECT_THAT(status.message(), HasSubstr("stage "));
  EXPECT_FALSE(created);

  options.engine.wire = WireType::kInt8;
  status = StartThreadCluster(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(),
              HasSubstr("the data plane between stages is nccl, but the wire is int8"));
  options = GpuCluster(2);
  options.engine.data_plane = DataPlane::kNccl;
  options.engine.backend = "cpu";
  status = StartThreadCluster(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(),
              HasSubstr("the data plane between stages is nccl, but they compute on cpu"));
}

TEST(RemoteGpus, WeightsThatNoGpuHolds) {
  ClusterOptions options = GpuCluster(1);
  options.worker.model_path = options.model;
  const auto worker = Worker::Start(options.worker);
  ASSERT_TRUE(worker.ok()) << worker.status();
  auto engine = EngineOptionsFor(options, {(*worker)->address()});
  engine->stages[0].weight_bytes = options.worker.ranks.gpus.gpus[0].memory_bytes + 1;
  const absl::Status status = RemoteEngine::Create(*std::move(engine)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

// Random models have no file that could be compared.
TEST(RemoteRandomModels, AnotherShapeIsAnotherModel) {
  const std::string tiny =
      "random:llama-3.2-1b,layers=2,hidden=64,heads=4,kv-heads=2,ffn=128,vocab=";
  ClusterOptions options;
  options.model = tiny + "300";
  options.stages = 2;
  EXPECT_EQ(StartThreadCluster(options).status(), absl::OkStatus());
  options.worker.model_path = tiny + "301";
  const auto worker = Worker::Start(options.worker);
  ASSERT_TRUE(worker.ok()) << worker.status();
  auto engine = EngineOptionsFor(options, {(*worker)->address()});
  const absl::Status status = RemoteEngine::Create(*std::move(engine)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("vocab=301 is another file"));
}

}  // namespace
}  // namespace treadle
