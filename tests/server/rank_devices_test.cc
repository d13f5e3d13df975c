// --device: which options go together, and whole models on GPUs as `serve` loads them. The GPUs are
// emulated: two of them.
#include "server/cli/rank_devices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "engine/local_engine.h"
#include "models/tokenizer.h"
#include "server/cli/load_ranks.h"
#include "tests/engine/two_requests.h"
#include "tests/support/default_model.h"
#include "tests/support/instrumented.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

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
  options.device = "cpu";
  devices = RankDevices::Choose(options);
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_FALSE(devices->cuda());
  EXPECT_FALSE(devices->Joiner());
  options.device = "auto";
  options.pipeline_parallel = 2;  // workers run on the CPU
  devices = RankDevices::Choose(options);
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_FALSE(devices->cuda());
}

TEST(RankDevices, WhatDoesNotGoTogetherIsNamed) {
  EXPECT_THAT(Refusal([](ServeOptions& o) { o.tensor_parallel = 3; }),
              HasSubstr("--tensor-parallel is 3, expected at most 2, the number of GPUs"));
  EXPECT_THAT(Refusal([](ServeOptions& o) { o.compute = "int8"; }),
              HasSubstr("--compute is int8, expected auto on a GPU"));
  EXPECT_THAT(Refusal([](ServeOptions& o) {
                o.device = "cuda";
                o.pipeline_parallel = 2;
              }),
              HasSubstr("workers run on the CPU"));
  EXPECT_THAT(Refusal([](ServeOptions& o) {
                o.device = "cpu";
                o.kv_dtype = "bf16";
              }),
              HasSubstr("--kv-dtype is bf16, expected f16 or f32 on the CPU"));
}

class WholeModels : public testing::TestWithParam<const char*> {};

struct Numbers {
  std::string dtype, kv_dtype;
};

std::vector<IterationResult> ResultsOn(const std::string& path, const std::string& device,
                                       const Numbers& numbers, std::vector<IterationPlan> plans) {
  ServeOptions options;
  options.device = device;
  options.dtype = numbers.dtype;
  options.compute = device == "cpu" ? "exact" : "auto";
  options.kv_dtype = numbers.kv_dtype;
  options.threads = 1;
  options.pin_threads = false;
  options.max_batch_tokens = 64;
  const auto checkpoint = Checkpoint::Open(path);
  const auto devices = RankDevices::Choose(options);
  TREADLE_CHECK(checkpoint.ok() && devices.ok());
  auto ranks = LoadRanks(**checkpoint, options, *devices, /*max_context=*/64, {});
  TREADLE_CHECK(ranks.ok());
  auto engine = LocalEngine::Create(*std::move(ranks), {.max_batch_tokens = 64,
                                                        .page_size = 16,
                                                        .kv_pages = 24,
                                                        .kv_dtype = KvTypeOf(options),
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
      EXPECT_EQ(cpu[i].steps[k].token, gpu[i].steps[k].token);
      EXPECT_NEAR(cpu[i].steps[k].detail.logprob, gpu[i].steps[k].detail.logprob, tolerance);
    }
  }
}

// In plain float arithmetic a GPU and a CPU give the same greedy tokens, and log probabilities
// within float's rounding.
TEST_P(WholeModels, SayTheSameOnAGpu) {
  const std::string directory = testing::TempDir() + Str("rank-devices-", getpid());
  std::filesystem::create_directories(directory);
  const bool llama = GetParam() == std::string("llama");
  const auto path = llama ? WriteTinyLlamaGguf(directory, {}) : WriteTinyGpt2Gguf(directory, {});
  ASSERT_TRUE(path.ok()) << path.status();
  const Numbers floats = {"fp32", "f32"};
  ExpectAlike(ResultsOn(*path, "cpu", floats, TwoRequests()),
              ResultsOn(*path, "cuda", floats, TwoRequests()), 1e-4);
  std::filesystem::remove_all(directory);
}
INSTANTIATE_TEST_SUITE_P(Architectures, WholeModels, testing::Values("llama", "gpt2"),
                         [](const auto& info) { return std::string(info.param); });

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
  const auto cpu = ResultsOn(path, "cpu", {"bf16", "f16"}, plans);
  EXPECT_EQ((*tokenizer)->Decode(std::vector{cpu[0].steps[0].token}, /*special=*/false), " Paris");
  ExpectAlike(cpu, ResultsOn(path, "cuda", {"bf16", "f16"}, plans), 0.05);
}

}  // namespace
}  // namespace treadle
