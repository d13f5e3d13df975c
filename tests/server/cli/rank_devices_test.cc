// --device: which options go together, and whole models on GPUs as `serve` loads them. The GPUs are
// emulated: two of them.
#include "server/cli/rank_devices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "engine/local_engine.h"
#include "kernels/op_cases/instrumented.h"
#include "models/architectures/architecture.h"
#include "models/text/tokenizer.h"
#include "tests/emulation/emulated_device.h"
#include "tests/engine/two_requests.h"
#include "tests/support/default_model.h"
#include "tests/support/identifier.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Refusal(const std::function<void(ServeOptions&)>& change) {
  ServeOptions options;
  change(options);
  return std::string(RankDevices::Choose(options).status().message());
}

TEST(RankDevices, AutoTakesGpusWhereThereAreAny) {
  ServeOptions options;
  auto devices = RankDevices::Choose(options);
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_TRUE(devices->cuda());
  EXPECT_TRUE(devices->Joiner());
  EXPECT_GT(devices->AvailableBytes(), 0);
  options.device = DeviceChoice::kCpu;
  devices = RankDevices::Choose(options);
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_FALSE(devices->cuda());
  EXPECT_FALSE(devices->Joiner());
}

// How often each of the two GPUs has been opened.
std::pair<int, int> Opened() { return {cuda::TimesOpened(0), cuda::TimesOpened(1)}; }

TEST(RankDevices, OnlyGpusOfThisProcessAreOpened) {
  const auto before = Opened();
  ServeOptions options;
  ASSERT_TRUE(RankDevices::Choose(options).ok());
  EXPECT_GT(Opened().first, before.first);
  EXPECT_EQ(Opened().second, before.second);

  const auto local = Opened();
  options.pipeline_parallel = 2;
  const auto devices = RankDevices::Choose(options);
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_EQ(devices->AvailableBytes(), int64_t{8} << 30);
  ASSERT_TRUE(FindWorkerGpus(DeviceChoice::kAuto, {}).ok());
  EXPECT_EQ(Opened(), local);
}

TEST(RankDevices, EveryStageHasItsOwnGpus) {
  ServeOptions options;
  options.pipeline_parallel = 2;
  auto devices = RankDevices::Choose(options);
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_TRUE(devices->cuda());
  EXPECT_THAT(devices->WorkerFlags(0), ElementsAre("--device", "cuda", "--devices", "0"));
  EXPECT_THAT(devices->WorkerFlags(1), ElementsAre("--device", "cuda", "--devices", "1"));
  options.device = DeviceChoice::kCpu;
  options.tensor_parallel = 2;
  devices = RankDevices::Choose(options);
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_THAT(devices->WorkerFlags(1), ElementsAre("--device", "cpu"));
}

// They have machines of their own.
TEST(RankDevices, WorkersElsewhereNeedNoGpuHere) {
  ServeOptions options;
  options.workers = {"a:1", "b:1", "c:1"};
  auto devices = RankDevices::Choose(options);
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_FALSE(devices->cuda());
  options.device = DeviceChoice::kCuda;
  devices = RankDevices::Choose(options);
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_TRUE(devices->cuda());
}

TEST(RankDevices, GpusOfAWorker) {
  const auto numbered = FindWorkerGpus(DeviceChoice::kCuda, {1, 0});
  ASSERT_TRUE(numbered.ok()) << numbered.status();
  ASSERT_EQ(numbered->gpus.size(), 2u);
  const auto all = FindWorkerGpus(DeviceChoice::kAuto, {});
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->gpus.size(), 2u);
  EXPECT_EQ(all->gpus[0].id, numbered->gpus[1].id);
  EXPECT_NE(all->gpus[0].id, all->gpus[1].id);
  EXPECT_TRUE(all->join);
  EXPECT_TRUE(all->link);
  EXPECT_EQ(all->free_bytes(1).value(), uint64_t{4} << 30);
  const auto opened = Opened();
  ASSERT_TRUE(numbered->create(0, DType::kBF16, true, 1).ok());
  EXPECT_EQ(Opened(), std::pair(opened.first, opened.second + 1));

  const auto none = FindWorkerGpus(DeviceChoice::kCpu, {});
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_TRUE(none->gpus.empty());
  EXPECT_THAT(FindWorkerGpus(DeviceChoice::kCuda, {0, 2}).status().message(),
              HasSubstr("--devices has 2, which this machine does not have"));
  EXPECT_THAT(FindWorkerGpus(DeviceChoice::kCuda, {1, 1}).status().message(),
              HasSubstr("has 1 twice"));
}

TEST(RankDevices, WhatDoesNotGoTogetherIsNamed) {
  EXPECT_THAT(Refusal([](ServeOptions& o) { o.tensor_parallel = 3; }),
              HasSubstr("--tensor-parallel is 3, expected at most 2, the number of GPUs"));
  EXPECT_THAT(Refusal([](ServeOptions& o) { o.compute = ComputeMode::kInt8; }),
              HasSubstr("--compute is int8, expected auto on a GPU"));
  EXPECT_THAT(Refusal([](ServeOptions& o) { o.kv_dtype = DType::kI8; }),
              HasSubstr("--kv-dtype is int8, expected f16, bf16 or f32 on a GPU"));
  EXPECT_THAT(Refusal([](ServeOptions& o) {
                o.device = DeviceChoice::kCuda;
                o.pipeline_parallel = 3;
                o.tensor_parallel = 2;
              }),
              HasSubstr("--pipeline-parallel 3 with --tensor-parallel 2 needs 6 GPUs, one for each "
                        "rank; this machine has 2"));
  EXPECT_THAT(Refusal([](ServeOptions& o) {
                o.device = DeviceChoice::kCpu;
                o.kv_dtype = DType::kBF16;
              }),
              HasSubstr("--kv-dtype is bf16, expected f16, f32 or int8 on the CPU"));
  EXPECT_THAT(Refusal([](ServeOptions& o) {
                o.workers = {"a:1", "b:1"};
                o.data_plane = DataPlane::kNccl;
              }),
              HasSubstr("--data-plane is nccl, but the stages compute on the CPU; expected gloo, "
                        "or --device cuda"));
}

class WholeModels : public testing::TestWithParam<Architecture> {};

struct Numbers {
  DType dtype, kv_dtype;
};

std::vector<IterationResult> ResultsOn(const std::string& path, DeviceChoice device,
                                       const Numbers& numbers, std::vector<IterationPlan> plans) {
  ServeOptions options;
  options.device = device;
  options.dtype = numbers.dtype;
  options.compute = device == DeviceChoice::kCpu ? ComputeMode::kExact : ComputeMode::kAuto;
  options.kv_dtype = numbers.kv_dtype;
  options.threads = 1;
  options.pin_threads = false;
  options.max_batch_tokens = 64;
  const auto checkpoint = Checkpoint::Open(path);
  const auto devices = RankDevices::Choose(options);
  TREADLE_CHECK(checkpoint.ok() && devices.ok());
  auto ranks = LoadRanks(**checkpoint, options, *devices, /*max_context=*/64, {});
  TREADLE_CHECK(ranks.ok());
  const ModelConfig& config = (*checkpoint)->config();
  const bool window = config.window > 0 || config.HasStates();
  auto engine = LocalEngine::Create(*std::move(ranks), {.max_batch_tokens = 64,
                                                        .page_size = 16,
                                                        .kv_pages = {24, window ? 24 : 0},
                                                        .kv_dtype = options.kv_dtype,
                                                        .join = devices->Joiner()});
  TREADLE_CHECK(engine.ok());
  EngineRunner runner(*std::move(engine));
  return RunPlans(runner, std::move(plans));
}

void ExpectAlike(const std::vector<IterationResult>& cpu, const std::vector<IterationResult>& gpu,
                 double tolerance) {
  ASSERT_EQ(cpu.size(), gpu.size());
  for (size_t i = 0; i < cpu.size(); ++i) {
    ASSERT_EQ(cpu[i].steps.size(), gpu[i].steps.size());
    for (size_t k = 0; k < cpu[i].steps.size(); ++k) {
      const std::vector<RowResult>& one = cpu[i].steps[k].outputs;
      const std::vector<RowResult>& other = gpu[i].steps[k].outputs;
      ASSERT_EQ(one.size(), other.size());
      for (size_t n = 0; n < one.size(); ++n) {
        EXPECT_EQ(one[n].token, other[n].token);
        EXPECT_NEAR(one[n].detail.logprob, other[n].detail.logprob, tolerance);
      }
    }
  }
}

// In plain float arithmetic a GPU and a CPU give the same greedy tokens, and log probabilities
// within float's rounding.
TEST_P(WholeModels, SayTheSameOnAGpu) {
  const std::string directory = testing::TempDir() + Str("rank-devices-", getpid());
  std::filesystem::create_directories(directory);
  const auto path = WriteTinyGguf(GetParam(), directory, {});
  ASSERT_TRUE(path.ok()) << path.status();
  const Numbers floats = {DType::kF32, DType::kF32};
  const auto checkpoint = Checkpoint::Open(*path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const ModelConfig& config = (*checkpoint)->config();
  bool window = false;
  for (int64_t i = 0; i < config.layers; ++i) window |= config.HasRing(i);
  ExpectAlike(ResultsOn(*path, DeviceChoice::kCpu, floats, TwoRequests(window)),
              ResultsOn(*path, DeviceChoice::kCuda, floats, TwoRequests(window)), 1e-4);
  std::filesystem::remove_all(directory);
}
// All that run on GPUs (HasLatents).
std::vector<Architecture> ArchitecturesOfGpus() {
  std::vector<Architecture> those;
  std::ranges::copy_if(Architectures(), std::back_inserter(those),
                       [](const Architecture& a) { return !a.latent; });
  return those;
}
INSTANTIATE_TEST_SUITE_P(Architectures, WholeModels, testing::ValuesIn(ArchitecturesOfGpus()),
                         [](const auto& info) { return Identifier(std::string(info.param.name)); });

// Its stored codes, activations in bf16: 2^-9 of each, some hundred roundings on the way to a
// logit.
TEST(WholeModel, TheDefaultModelToo) {
  if (kInstrumented) GTEST_SKIP() << "minutes under a sanitizer; the tiny models run the kernels";
  NEEDS_DEFAULT_MODEL(path);
  const auto checkpoint = Checkpoint::Open(path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto tokenizer = Tokenizer::Create(*(*checkpoint)->tokenizer());
  const auto prompt = (*tokenizer)->Encode("The capital of France is", EncodeOptions{});
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  const auto length = static_cast<int32_t>(prompt->size());
  std::vector<IterationPlan> plans = {
      PlanOf(1, 0).Start(StartOf(1, length, {0, 1})).Step(SampleOf(StepOf(1, 0, *prompt), 0))};
  for (int32_t i = 0; i < 3; ++i) {
    plans.push_back(PlanOf(1, i + 1).Step(SampleOf(PreviousSample(1, length + i), 0)));
  }
  const auto cpu = ResultsOn(path, DeviceChoice::kCpu, {DType::kBF16, DType::kF16}, plans);
  EXPECT_EQ((*tokenizer)->Decode(std::vector{cpu[0].steps[0].token()}, /*special=*/false),
            " Paris");
  ExpectAlike(cpu, ResultsOn(path, DeviceChoice::kCuda, {DType::kBF16, DType::kF16}, plans), 0.05);
}

}  // namespace
}  // namespace treadle
