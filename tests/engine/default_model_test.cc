// The default model file through the engine, on the CPU backend: what it answers, and that company
// does not change it. Needs the file; `make test` fetches it.
#include "tests/support/default_model.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/op_cases/instrumented.h"
#include "models/checkpoints/checkpoint.h"
#include "models/model.h"
#include "tests/engine/company/company.h"
#include "tests/engine/engine_runner.h"
#include "tests/support/ranks/one_rank.h"

namespace treadle {
namespace {

// The model's own chat template around "What is the capital of France?", as ids of the tokenizers
// library (37 tokens).
const std::vector<int32_t> kFrancePrompt = {
    1,   9690, 198, 2683, 359,   253,  5356, 5646, 11173, 3365, 3511, 308,  34519,
    28,  7018, 411, 407,  19712, 8182, 2,    198,  1,     4093, 198,  1780, 314,
    260, 3575, 282, 4649, 47,    2,    198,  1,    520,   9531, 198};
// "The capital of France is Paris." and <|im_end|>.
const std::vector<int32_t> kFranceAnswer = {504, 3575, 282, 4649, 314, 7042, 30, 2};

constexpr int64_t kMaxBatchTokens = 96;

RankFactory CpuRank(const Checkpoint& checkpoint, ComputeMode compute) {
  return {[compute] {
            CpuBackendOptions options;
            options.threads = 2;
            options.compute = compute;
            auto backend = CreateCpuBackend(options);
            TREADLE_CHECK(backend.ok());
            return *std::move(backend);
          },
          [&checkpoint](Backend& backend) {
            LoadOptions options;
            options.max_batch_tokens = kMaxBatchTokens;
            options.max_context = 1024;
            auto model = Model::Load(checkpoint, backend, options);
            TREADLE_CHECK(model.ok());
            return *std::move(model);
          }};
}

class DefaultModel : public ::testing::TestWithParam<ComputeMode> {
 protected:
  void SetUp() override {
    NEEDS_DEFAULT_MODEL(path);
    auto checkpoint = Checkpoint::Open(path);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    checkpoint_ = *std::move(checkpoint);
  }

  LocalEngineOptions Options() const {
    return {.max_batch_tokens = kMaxBatchTokens, .page_size = 16, .kv_pages = 64};
  }

  std::unique_ptr<Checkpoint> checkpoint_;
};

PlanDriver::DrivenRequest France() {
  PlanDriver::DrivenRequest france;
  france.request.prompt = kFrancePrompt;
  france.request.sampling.temperature = 0;
  france.request.max_new_tokens = 12;
  france.request.end_tokens = {2};
  france.request.top_logprobs = 3;
  return france;
}

TEST_P(DefaultModel, AnswersFranceInCompany) {
  const RankFactory rank = CpuRank(*checkpoint_, GetParam());
  auto requests = RandomRequests(1, 5, 49152, 60, 8);
  requests.insert(requests.begin() + 2, France());
  PlanDriver driver(
      {.paging = {.page_size = 16}, .num_pages = 64, .max_batch_tokens = kMaxBatchTokens},
      requests);
  std::unique_ptr<Backend> backend = rank.backend();
  std::unique_ptr<Model> model = rank.model(*backend);
  auto engine = OneRankEngine(std::move(backend), std::move(model), Options());
  ASSERT_TRUE(engine.ok()) << engine.status();
  EngineRunner(*std::move(engine)).RunAll(driver);
  EXPECT_EQ(driver.answer(2, 0).tokens, kFranceAnswer);
}

TEST_P(DefaultModel, CompanyDoesNotMatter) {
  auto requests =
      kInstrumented ? RandomRequests(2, 2, 49152, 20, 4) : RandomRequests(2, 5, 49152, 60, 8);
  requests.push_back(France());
  ExpectCompanyDoesNotMatter(CpuRank(*checkpoint_, GetParam()), Options(), requests, 2);
}

INSTANTIATE_TEST_SUITE_P(Compute, DefaultModel,
                         ::testing::Values(ComputeMode::kAuto, ComputeMode::kExact),
                         [](const auto& info) {
                           return info.param == ComputeMode::kExact ? "Exact" : "Auto";
                         });

}  // namespace
}  // namespace treadle
