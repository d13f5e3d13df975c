// The promise of every Engine that what a request gets depends on that request alone (N1 to N3),
// not on its company, chunks, pages, stages or adapters of others.
#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "tests/engine/company/company.h"
#include "tests/engine/engine_contract.h"
#include "tests/support/ranks/one_rank.h"
#include "tests/support/reference_runner.h"

namespace treadle {
namespace {

absl::StatusOr<std::unique_ptr<Model>> LoadTiny(Backend& backend,
                                                const std::string& path = TinyPath(),
                                                int64_t max_batch_tokens = 64) {
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(path));
  LoadOptions load;
  load.max_batch_tokens = max_batch_tokens;
  return Model::Load(*checkpoint, backend, load);
}

// The same stream of requests, whatever the placement: with one rank the very bits that each
// request gets alone (N1 to N3), with several the same bits in every run. Alone, each has all pages
// that there are.
using AdapterFiles = std::vector<std::shared_ptr<const AdapterFile>>;
void ExpectAsAlone(const EngineKind& kind, const std::string& path,
                   const LocalEngineOptions& options,
                   const std::vector<PlanDriver::DrivenRequest>& requests,
                   const AdapterFiles& adapters = {}) {
  const std::unique_ptr<Backend> backend = MakeBackend(kind);
  constexpr int64_t kMaxTokens = 128;
  auto model = LoadTiny(*backend, path, kMaxTokens);
  ASSERT_TRUE(model.ok()) << model.status();
  const KvPaging paging =
      KvPaging::Of((*model)->config(), options.page_size, options.max_batch_tokens);
  const auto run = [&](uint32_t seed) {
    auto driver = std::make_unique<PlanDriver>(
        PlanDriver::Options{.paging = paging,
                            .num_pages = options.kv_pages,
                            .max_batch_tokens = options.max_batch_tokens,
                            .seed = seed,
                            .one_plan_each = kind.stages > 1},
        requests);
    EngineRunner runner(MakeEngine(kind, path, options));
    for (const auto& adapter : adapters) {
      EXPECT_EQ(runner.engine().LoadAdapter(adapter), absl::OkStatus());
    }
    runner.RunAll(*driver);
    EXPECT_EQ(driver->free_pages(), options.kv_pages);
    return driver;
  };
  const auto first = run(1);
  const auto second = run(2);
  // Sums over states begin at each page; others know nothing of pages.
  const bool states = (*model)->config().HasStates();
  ReferenceRunner alone(*backend, **model, kMaxTokens, states ? options.page_size : 64,
                        DType::kF32);
  for (const auto& adapter : adapters) {
    const auto loaded = (*model)->LoadAdapter(*adapter);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    alone.Add(adapter->id(), *loaded);
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    for (int32_t candidate = 0; candidate < requests[i].candidates; ++candidate) {
      SCOPED_TRACE(Str("request ", i, ", candidate ", candidate));
      const AloneAnswer& answer = first->answer(i, candidate);
      EXPECT_EQ(answer.tokens, second->answer(i, candidate).tokens);
      EXPECT_EQ(Difference(answer.details, second->answer(i, candidate).details), "");
      if (kind.ranks > 1) continue;
      AloneRequest request = requests[i].request;
      request.candidate = static_cast<uint32_t>(candidate);
      if (candidate > 0) request.prompt_logprobs = -1;  // candidate 0 has them
      const AloneAnswer expected = alone.Run(request, static_cast<int64_t>(request.prompt.size()));
      EXPECT_EQ(answer.tokens, expected.tokens);
      EXPECT_EQ(Difference(answer.details, expected.details), "");
      EXPECT_EQ(Difference(answer.prompt_details, expected.prompt_details), "");
    }
  }
}

TEST_P(EngineContract, CompanyAndPlacementDoNotMatter) {
  const bool few = GetParam().gpus;
  ExpectAsAlone(GetParam(), TinyPath(), Options(),
                RandomRequests(3, few ? 4 : 12, TinyVocabulary(), few ? 20 : 40, few ? 5 : 12));
}

// Each request has one of three adapters, a soft prompt of 11 positions, or none.
TEST_P(EngineContract, AdaptersOfTheCompanyDoNotMatter) {
  if (!HasAdapters()) GTEST_SKIP() << "the model has two layers, for two stages at most";
  AdapterFiles adapters;
  for (const char* const name : {"llama", "llama-second", "llama-bf16", "soft-llama"}) {
    adapters.push_back(OpenAdapter(name));
  }
  const auto vocab = static_cast<int32_t>(Checkpoint::Open(kAdapterBase).value()->config().vocab);
  const bool few = GetParam().gpus;
  auto requests = RandomRequests(6, few ? 5 : 20, vocab, few ? 20 : 40, few ? 4 : 12);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].request.top_logprobs = 3;
    if (i % 5 == 4) continue;
    requests[i].request.adapter = adapters[i % 5]->id();
    std::vector<int32_t>& prompt = requests[i].request.prompt;
    prompt.insert(prompt.begin(), static_cast<size_t>(adapters[i % 5]->virtual_tokens()), 0);
  }
  ExpectAsAlone(GetParam(), kAdapterBase, Options(), requests, adapters);
}

// Neither does it where the pages behind a window are used again: rings of 48 positions for
// requests of up to 120. A window of 18 and a step of 16 rows need 33 positions, one more than two
// pages have. A state's ring is two pages, for steps of any length.
TEST_P(EngineContract, RingsOfPagesDoNotMatter) {
  const bool few = GetParam().gpus;
  LocalEngineOptions options = Options();
  struct Row {
    std::string path;
    int64_t whole_pages, tokens;
  };
  // A window of each layer; of each second one; and heads of another size in these, the last two of
  // which read K/V of the others.
  std::vector<Row> rows = {{TinyPath("llama", 18), 0, 16},
                           {TinyPath("gemma3"), 48, 16},
                           {TinyPath("gemma4", 0, stages() == 1 ? 2 : 0), 48, 16}};
  // States in each second layer; in the last family layers are of one block.
  for (const char* const states : {"qwen35", "lfm2", "granitehybrid", "nemotron_h"}) {
    if (!few || rows.size() == 3) rows.push_back({TinyPath(states), 48, 50});
  }
  for (const auto& [path, whole_pages, tokens] : rows) {
    SCOPED_TRACE(path);
    options.max_batch_tokens = tokens;
    options.kv_pages = {whole_pages, 32};
    auto requests = RandomRequests(4, few ? 2 : 10, TinyVocabulary(), few ? 70 : 110, few ? 3 : 10);
    for (auto& driven : requests) driven.request.top_logprobs = 3;
    ExpectAsAlone(GetParam(), path, options, requests);
  }
}

// Neither do other requests, chunks, stages and candidates that share pages where pages hold
// latents.
TEST_P(EngineContract, LatentsAreAsAlone) {
  if (GetParam().gpus) GTEST_SKIP() << "GPUs have no latents (HasLatents)";
  auto requests = RandomRequests(5, 10, TinyVocabulary(), 70, 8);
  requests[0].candidates = 3;
  for (auto& driven : requests) driven.request.top_logprobs = 3;
  ExpectAsAlone(GetParam(), TinyPath("deepseek3"), Options(), requests);
}

// A prompt's pooled hidden states, in chunks of these sizes, beside a sequence that decodes.
std::vector<float> Pooled(EngineRunner& runner, Pooling pooling, std::span<const int32_t> prompt,
                          std::vector<size_t> chunks, bool company) {
  runner.engine().Restart();
  runner.WaitForRoom();
  const uint64_t epoch = runner.engine().epoch();
  IterationPlan plan =
      PlanOf(epoch, 0).Start(StartOf(1, static_cast<int32_t>(prompt.size()), {3, 1, 2}));
  plan.starts[0].mean_pooling = pooling == Pooling::kMean;
  if (company) {
    plan.starts.push_back(StartOf(2, 3, {5}));
    plan.steps.push_back(SampleOf(StepOf(2, 0, {1, 2, 3})));
  }
  for (size_t at = 0;;) {
    const size_t count = chunks[plan.iteration % chunks.size()];
    const auto part = prompt.subspan(at, std::min(count, prompt.size() - at));
    Step step = StepOf(1, static_cast<int32_t>(at), {part.begin(), part.end()});
    at += part.size();
    const bool last = at == prompt.size();
    plan.steps.push_back(last ? HiddenOf(step) : step);
    runner.engine().Submit(plan);
    IterationResult result = runner.Next();
    EXPECT_EQ(result.steps.back().token(), -1);
    if (last) return std::move(result.steps.back().outputs[0].hidden);
    EXPECT_TRUE(result.steps.back().outputs.empty());
    plan = PlanOf(epoch, plan.iteration + 1);
    if (company) {
      const auto position = static_cast<int32_t>(2 + plan.iteration);
      plan.steps.push_back(SampleOf(StepOf(2, position, {result.steps[0].token()})));
    }
  }
}

// Ranks merge what they make of greedy rows, and gather the logits of rows whose draw may need any
// token: with one of these beside it, a greedy row has the log probabilities that it has alone.
TEST_P(EngineContract, HowOthersAreSampledDoesNotMatter) {
  std::vector<PlanDriver::DrivenRequest> requests(2);
  for (int i = 0; i < 2; ++i) {
    for (int32_t t = 0; t < 9; ++t) requests[i].request.prompt.push_back((t * 41 + 3 * i) % 256);
    requests[i].request.max_new_tokens = GetParam().gpus ? 4 : 60;
    requests[i].request.top_logprobs = 5;
  }
  requests[0].request.sampling.temperature = 0;
  requests[1].request.sampling.temperature = 1;
  requests[1].request.sampling.seed = 7;
  const auto answer = [&](std::span<const PlanDriver::DrivenRequest> together) {
    PlanDriver driver(
        {.num_pages = 48, .max_batch_tokens = 64, .seed = 1, .one_plan_each = stages() > 1},
        {together.begin(), together.end()});
    EngineRunner(MakeEngine(GetParam(), TinyPath(), Options())).RunAll(driver);
    return driver.answer(0, 0);
  };
  const AloneAnswer alone = answer(std::span(requests).first(1)), beside = answer(requests);
  EXPECT_EQ(beside.tokens, alone.tokens);
  EXPECT_EQ(Difference(beside.details, alone.details), "");
}

// Neither its neighbours nor its chunks change an embedding's bits; and of one rank's, neither do
// stages.
TEST_P(EngineContract, EmbeddingsDependOnTheirPromptAlone) {
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < (GetParam().gpus ? 20 : 45); ++i) prompt.push_back((i * 37 + 5) % 256);
  std::unique_ptr<Backend> backend = MakeBackend(GetParam());
  auto model = LoadTiny(*backend);
  ASSERT_TRUE(model.ok());
  EngineRunner one(*OneRankEngine(std::move(backend), *std::move(model), Options()));
  for (const Pooling pooling : {Pooling::kMean, Pooling::kLast}) {
    const std::vector<float> whole = Pooled(*runner_, pooling, prompt, {60}, false);
    ASSERT_EQ(whole.size(), 64u);
    EXPECT_EQ(Pooled(*runner_, pooling, prompt, {7, 1, 16}, true), whole);
    const std::vector<float> alone = Pooled(one, pooling, prompt, {60}, false);
    if (GetParam().ranks == 1) {
      EXPECT_EQ(whole, alone);
    } else {
      for (size_t i = 0; i < alone.size(); ++i) EXPECT_NEAR(whole[i], alone[i], 1e-4) << i;
    }
  }
  EXPECT_NE(Pooled(one, Pooling::kMean, prompt, {60}, false),
            Pooled(one, Pooling::kLast, prompt, {60}, false));
}

}  // namespace
}  // namespace treadle
