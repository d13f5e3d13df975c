// Promises of every Engine (engine/engine.h), on a tiny Llama: the same tests for an engine in
// this process and for one made of worker processes, however many stages and ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <set>

#include "base/status.h"
#include "kernels/op_cases/instrumented.h"
#include "models/architectures/architecture.h"
#include "tests/engine/company/company.h"
#include "tests/engine/engine_kinds.h"
#include "tests/engine/engine_runner.h"
#include "tests/engine/plan_builder.h"
#include "tests/support/ranks/one_rank.h"
#include "tests/support/reference_runner.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

// Tiny models in a folder of their own. Four
// layers, so that four stages have one each; heads and K/V heads that two and four ranks divide.
struct TinyFiles {
  TinyFiles() {
    llama = Write("llama", 0);
    window = Write("llama", 18);
    windows = Write("gemma3", 0);
    states = {Write("qwen35", 0), Write("lfm2", 0), Write("granitehybrid", 0),
              Write("nemotron_h", 0)};
    latents = Write("deepseek3", 0);
    heads = Write("gemma4", 0);
    shared = Write("gemma4", 0, 2);
  }
  std::string Write(const char* architecture, int64_t window_of_all, int64_t sharing = 0) const {
    const std::string folder = own.Folder(Str(architecture, window_of_all, sharing));
    TinyModelOptions options;
    options.layers = 4;
    options.window = window_of_all;
    options.shared_kv_layers = sharing;
    auto written = WriteTinyGguf(*FindArchitecture(architecture), folder, options);
    TREADLE_CHECK(written.ok());
    return *written;
  }
  TestFolder own;
  std::string llama, window, windows;  // no layer's, each layer's, each second layer's
  std::vector<std::string> states;     // each second layer keeps one; the last: layers of one block
  std::string latents;                 // of which K and V are made
  // These have heads of another size in each second layer; the last two read K/V of the others.
  std::string heads, shared;
};
const TinyFiles& Tiny() {
  static const TinyFiles files;
  return files;
}
const std::string& TinyPath() { return Tiny().llama; }

absl::StatusOr<std::unique_ptr<Model>> LoadTiny(Backend& backend,
                                                const std::string& path = TinyPath(),
                                                int64_t max_batch_tokens = 64) {
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(path));
  LoadOptions load;
  load.max_batch_tokens = max_batch_tokens;
  return Model::Load(*checkpoint, backend, load);
}

LocalEngineOptions Options() {
  return {.max_batch_tokens = 64, .page_size = 16, .kv_pages = 48, .kv_dtype = DType::kF32};
}

IterationPlan OneRequest(uint64_t epoch, uint64_t iteration, SequenceId id = 1) {
  return PlanOf(epoch, iteration)
      .Start(StartOf(id, 3, {static_cast<int32_t>(id)}))
      .Step(SampleOf(StepOf(id, 0, {1, 2, 3})));
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

class EngineContract : public testing::TestWithParam<EngineKind> {
 protected:
  void SetUp() override {
    if (kThreadSanitized && GetParam().gpus) {
      GTEST_SKIP() << "minutes for an iteration under ThreadSanitizer; RemoteGpus has such stages";
    }
    runner_ = std::make_unique<EngineRunner>(MakeEngine(GetParam(), TinyPath(), Options()));
    runner_->WaitForRoom();
  }
  Engine& engine() { return runner_->engine(); }
  int stages() const { return std::max(1, GetParam().stages); }

  std::unique_ptr<EngineRunner> runner_;
};

TEST_P(EngineContract, RunsPlansInOrder) {
  EXPECT_EQ(engine().stages(), stages());
  EXPECT_GE(engine().depth(), stages());
  const uint64_t epoch = engine().epoch();
  int submitted = 0;
  for (; engine().HasRoom(); ++submitted) engine().Submit(OneRequest(epoch, submitted, submitted));
  EXPECT_EQ(submitted, engine().depth());
  for (int i = 0; i < submitted; ++i) {
    const IterationResult result = runner_->Next();
    EXPECT_EQ(result.epoch, epoch);
    EXPECT_EQ(result.iteration, static_cast<uint64_t>(i));
    ASSERT_EQ(result.steps.size(), 1u);
    EXPECT_EQ(result.steps[0].sequence, static_cast<SequenceId>(i));
    EXPECT_GE(result.steps[0].token(), 0);
    EXPECT_GT(result.timings.compute, 0);
    if (!GetParam().asynchronous()) {  // else part of compute
      EXPECT_GT(result.timings.sample, 0);
    }
  }
  EXPECT_TRUE(engine().HasRoom());
  EXPECT_TRUE(engine().TakeResults().empty());
  EXPECT_EQ(engine().status(), absl::OkStatus());
}

// A finished plan stays in flight until its result was taken.
TEST_P(EngineContract, RoomComesWithTakingResults) {
  const uint64_t epoch = engine().epoch();
  for (int i = 0; i < engine().depth(); ++i) engine().Submit(OneRequest(epoch, i, i));
  EXPECT_FALSE(engine().HasRoom());
  runner_->Next();
  EXPECT_TRUE(engine().HasRoom());
}

TEST_P(EngineContract, HeartbeatsComeBackEmpty) {
  for (uint64_t i = 0; i < 5; ++i) {
    engine().Submit(PlanOf(engine().epoch(), i));
    const IterationResult result = runner_->Next();
    EXPECT_EQ(result.iteration, i);
    EXPECT_TRUE(result.steps.empty());
  }
}

TEST_P(EngineContract, ABadPlanEndsTheEpochAndRestartRecovers) {
  const uint64_t epoch = engine().epoch();
  engine().Submit(OneRequest(epoch, 0));
  runner_->Next();
  engine().Submit(PlanOf(epoch, 1).Step(StepOf(77, 0, {1})));
  runner_->WaitForError();
  EXPECT_EQ(engine().status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message(engine().status()), HasSubstr("step of unknown sequence 77"));
  EXPECT_FALSE(engine().HasRoom());
  engine().Submit(PlanOf(epoch, 2));  // the epoch is over: ignored
  EXPECT_TRUE(engine().TakeResults().empty());

  engine().Restart();
  runner_->WaitForRoom();
  EXPECT_EQ(engine().status(), absl::OkStatus());
  EXPECT_EQ(engine().epoch(), epoch + 1);
  engine().Submit(OneRequest(epoch + 1, 0));  // the same id again: the tables are empty
  EXPECT_EQ(runner_->Next().epoch, epoch + 1);
}

TEST_P(EngineContract, PlansOfAnotherEpochOrOutOfOrderEndTheEpoch) {
  engine().Submit(PlanOf(engine().epoch() + 5, 0));
  EXPECT_THAT(Message(engine().status()), HasSubstr("plan of epoch 6, iteration 0; expected"));
  engine().Restart();
  runner_->WaitForRoom();
  engine().Submit(PlanOf(engine().epoch(), 1));
  EXPECT_THAT(Message(engine().status()), HasSubstr("expected epoch 2, iteration 0"));
  EXPECT_TRUE(engine().TakeResults().empty());
}

TEST_P(EngineContract, RestartDropsWhatIsUnderWay) {
  for (int round = 0; round < 5; ++round) {
    const uint64_t epoch = engine().epoch();
    for (int i = 0; i < engine().depth(); ++i) engine().Submit(OneRequest(epoch, i, i));
    engine().Restart();
    EXPECT_EQ(engine().epoch(), epoch + 1);
    runner_->WaitForRoom();
    EXPECT_TRUE(engine().TakeResults().empty());
  }
}

OutputMask MaskOf(int32_t step, std::initializer_list<int32_t> tokens) {
  OutputMask mask{
      .step = step, .output = 0, .allowed = std::vector<uint32_t>(MaskWords(TinyVocabulary()))};
  for (const int32_t token : tokens) mask.allowed[token / 32] |= 1u << (token % 32);
  return mask;
}
// Masks before their plan, after it, and in parts; beside steps that have none.
TEST_P(EngineContract, MaskedStepsSampleWhatIsAllowed) {
  const uint64_t epoch = engine().epoch();
  const int32_t last = TinyVocabulary() - 1;
  engine().SetMasks(epoch, 0, {MaskOf(0, {7})});
  engine().Submit(PlanOf(epoch, 0)
                      .Start(StartOf(1, 2, {1}))
                      .Start(StartOf(2, 2, {2}))
                      .Start(StartOf(3, 2, {3}))
                      .Step(MaskedOf(StepOf(1, 0, {1, 2})))
                      .Step(SampleOf(StepOf(2, 0, {1, 2})))
                      .Step(MaskedOf(StepOf(3, 0, {1, 2}))));
  EXPECT_TRUE(engine().TakeResults().empty());
  engine().SetMasks(epoch + 1, 0, {MaskOf(2, {9})});  // of another epoch
  engine().SetMasks(epoch, 0, {MaskOf(2, {last})});
  const IterationResult first = runner_->Next();
  EXPECT_EQ(first.steps[0].token(), 7);
  EXPECT_EQ(first.steps[2].token(), last);
  // One that follows a sample which the host has not seen is masked like any other. (Of several
  // stages, only the last has that.)
  const Step next = stages() > 1 ? StepOf(1, 2, {7}) : PreviousSample(1, 2);
  IterationPlan plan =
      PlanOf(epoch, 1).Step(MaskedOf(next)).Step(SampleOf(StepOf(2, 2, {first.steps[1].token()})));
  engine().Submit(plan);
  engine().SetMasks(epoch, 1, {MaskOf(0, {11, 12})});
  const IterationResult second = runner_->Next();
  EXPECT_TRUE(second.steps[0].token() == 11 || second.steps[0].token() == 12);

  // Tokens sampled without a mask are what they would be without company.
  engine().Submit(PlanOf(epoch, 2).Start(StartOf(4, 2, {4})).Step(SampleOf(StepOf(4, 0, {1, 2}))));
  EXPECT_EQ(runner_->Next().steps[0].token(), first.steps[1].token());
}

TEST_P(EngineContract, MasksThatDoNotFitEndTheEpoch) {
  const auto plan = [&] {
    return IterationPlan(
        PlanOf(engine().epoch(), 0).Start(StartOf(1, 2, {1})).Step(MaskedOf(StepOf(1, 0, {1, 2}))));
  };
  const struct {
    OutputMask mask;
    const char* error;
  } rows[] = {{{0, 0, {1, 2, 3}}, "has 3 words, expected"},
              {MaskOf(5, {7}), "a mask of output 0 of step 5"}};
  for (const auto& [mask, error] : rows) {
    engine().Submit(plan());
    engine().SetMasks(engine().epoch(), 0, {mask});
    runner_->WaitForError();
    EXPECT_THAT(Message(engine().status()), HasSubstr(error));
    engine().Restart();
    runner_->WaitForRoom();
  }
  engine().Submit(plan());  // without any: the restart ends the wait
  engine().Restart();
  runner_->WaitForRoom();
  engine().Submit(PlanOf(engine().epoch(), 0));
  runner_->Next();
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

// Whether the base of tests/testdata/adapters can be cut so.
bool HasAdapters(const EngineKind& kind) { return kind.stages <= 2 && kind.ranks <= 2; }

// Each request has one of three adapters, a soft prompt of 11 positions, or none.
TEST_P(EngineContract, AdaptersOfTheCompanyDoNotMatter) {
  if (!HasAdapters(GetParam())) GTEST_SKIP() << "the model has two layers, for two stages at most";
  const std::string base = TREADLE_TESTDATA "/models/llama-grouped";
  const auto checkpoint = Checkpoint::Open(base);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  AdapterFiles adapters;
  for (const char* const name : {"llama", "llama-second", "llama-bf16", "soft-llama"}) {
    auto opened =
        AdapterFile::Open(Str(TREADLE_TESTDATA "/adapters/", name), (*checkpoint)->config());
    ASSERT_TRUE(opened.ok()) << opened.status();
    adapters.push_back(*std::move(opened));
  }
  const auto vocab = static_cast<int32_t>((*checkpoint)->config().vocab);
  const bool few = GetParam().gpus;
  auto requests = RandomRequests(6, few ? 5 : 20, vocab, few ? 20 : 40, few ? 4 : 12);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].request.top_logprobs = 3;
    if (i % 5 == 4) continue;
    requests[i].request.adapter = adapters[i % 5]->id();
    std::vector<int32_t>& prompt = requests[i].request.prompt;
    prompt.insert(prompt.begin(), static_cast<size_t>(adapters[i % 5]->virtual_tokens()), 0);
  }
  ExpectAsAlone(GetParam(), base, Options(), requests, adapters);
}

// An adapter that is not loaded, or not any more, ends the epoch; what has begun with it goes on.
TEST_P(EngineContract, AnAdapterIsThereFromItsLoadToItsUnload) {
  if (!HasAdapters(GetParam())) GTEST_SKIP() << "the model has two layers, for two stages at most";
  const std::string base = TREADLE_TESTDATA "/models/llama-grouped";
  const auto checkpoint = Checkpoint::Open(base);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto adapter =
      AdapterFile::Open(TREADLE_TESTDATA "/adapters/llama", (*checkpoint)->config());
  ASSERT_TRUE(adapter.ok()) << adapter.status();
  EngineRunner runner(MakeEngine(GetParam(), base, Options()));
  Engine& engine = runner.engine();
  runner.WaitForRoom();
  const auto with_adapter = [&](uint64_t iteration, SequenceId id) {
    IterationPlan plan = OneRequest(engine.epoch(), iteration, id);
    plan.starts[0].adapter = (*adapter)->id();
    return plan;
  };
  engine.Submit(with_adapter(0, 1));
  runner.WaitForError();
  EXPECT_THAT(Message(engine.status()), HasSubstr(Str("adapter ", (*adapter)->id())));
  EXPECT_THAT(Message(engine.status()), HasSubstr("which is not loaded"));
  EXPECT_EQ(engine.LoadAdapter(*adapter), absl::OkStatus());
  engine.Restart();
  runner.WaitForRoom();
  engine.Submit(with_adapter(0, 1));
  const int32_t token = runner.Next().steps[0].token();
  engine.UnloadAdapter((*adapter)->id());
  const auto other =
      AdapterFile::Open(TREADLE_TESTDATA "/adapters/llama-bf16", (*checkpoint)->config());
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(engine.LoadAdapter(*other), absl::OkStatus());  // once workers have done the former
  engine.Submit(PlanOf(engine.epoch(), 1).Step(SampleOf(StepOf(1, 3, {token}))));
  runner.Next();
  engine.Submit(with_adapter(2, 2));
  runner.WaitForError();
  EXPECT_THAT(Message(engine.status()), HasSubstr("which is not loaded"));
}

// Neither does it where the pages behind a window are used again: rings of 48 positions for
// requests of up to 120. A window of 18 and a step of 16 rows need 33 positions, one more than two
// pages have. A state's ring is two pages, for steps of any length.
TEST_P(EngineContract, RingsOfPagesDoNotMatter) {
  const bool few = GetParam().gpus;
  LocalEngineOptions options = Options();
  options.max_batch_tokens = 16;
  const std::string& heads = stages() == 1 ? Tiny().shared : Tiny().heads;
  std::vector<std::string> paths = {Tiny().window, Tiny().windows, heads};
  const auto& states = Tiny().states;
  paths.insert(paths.end(), states.begin(), few ? states.begin() + 1 : states.end());
  for (const std::string& path : paths) {
    SCOPED_TRACE(path);
    const bool keeps = std::ranges::find(states, path) != states.end();
    options.max_batch_tokens = keeps ? 50 : 16;
    options.kv_pages = {path == Tiny().window ? 0 : 48, 32};
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
  ExpectAsAlone(GetParam(), Tiny().latents, Options(), requests);
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

TEST_P(EngineContract, TheTimelineHasEveryStageAndRank) {
  const uint64_t epoch = engine().epoch();
  engine().SetTracing(true);
  std::set<std::pair<int, int>> seen;
  // Tracing begins, and events arrive, a little later on other processes.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (uint64_t i = 0; static_cast<int>(seen.size()) < stages() * GetParam().ranks; i += 2) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    engine().Submit(OneRequest(epoch, i));
    runner_->Next();
    for (const TraceEvent& event : engine().TakeTrace()) {
      EXPECT_LE(event.begin, event.end);
      EXPECT_LE(event.iteration, i);
      if (event.kind == TraceEvent::Kind::kForward) seen.insert({event.stage, event.rank});
    }
    engine().Submit(PlanOf(epoch, i + 1).Release(1));
    runner_->Next();
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, EngineContract, testing::ValuesIn(EngineKinds()),
                         [](const auto& info) { return info.param.Name(); });

}  // namespace
}  // namespace treadle
