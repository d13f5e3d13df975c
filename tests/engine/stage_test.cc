// A stage's calls of the model for a given plan, and its use of the model's answer.
#include "engine/stage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>

#include "base/status.h"
#include "kernels/reference/reference_backend.h"
#include "tests/engine/plan_builder.h"
#include "tests/support/assert_ok.h"
#include "tests/support/prefix_model.h"

namespace treadle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Span = PrefixModel::Call::Span;

// A plan of small numbers, many of them wrong; steps often begin where their sequence stands.
IterationPlan RandomPlan(std::mt19937& random, std::map<SequenceId, int32_t>& next_positions) {
  const auto number = [&](int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random() % static_cast<uint32_t>(high - low + 1));
  };
  IterationPlan plan;
  if (number(0, 3) == 0) plan.releases.push_back(number(1, 6));
  if (number(0, 9) == 0)
    plan.page_copies[PageKind::kWhole].push_back({number(-1, 32), number(-1, 32)});
  if (number(0, 2) == 0) {
    SequenceStart start = StartOf(number(1, 6), number(0, 20), {});
    for (int pages = number(0, 3); pages > 0; --pages)
      start.pages[PageKind::kWhole].push_back(number(0, 32));
    if (number(0, 4) == 0) start.first_position = number(-1, 20);
    if (number(0, 3) == 0) start.sampling.repetition_penalty = 1.5f;
    start.mean_pooling = number(0, 9) == 0;
    if (number(0, 9) == 0) start.earlier_tokens.resize(number(0, 20), number(-1, 50));
    plan.starts.push_back(start);
  }
  for (int n = number(0, 2); n > 0; --n) {
    Step step = StepOf(number(1, 6), number(-1, 20), {});
    if (number(0, 4) > 0) step.first_position = next_positions[step.sequence];
    step.num_tokens = number(number(0, 9) == 0 ? 0 : 1, 6);
    if (number(0, 3) > 0) step.tokens.resize(step.num_tokens, number(number(-9, 0) / 9, 49));
    if (step.tokens.empty() && number(0, 3) > 0) step.num_tokens = 1;
    for (int32_t row = 0; row < step.num_tokens; ++row) {
      if (number(0, 2) > 0) continue;
      step.outputs.push_back({.row = number(0, 19) == 0 ? number(-1, 6) : row,
                              .sample = number(0, 1) == 1,
                              .hidden = number(0, 3) == 0,
                              .top_logprobs = number(-1, number(0, 19) == 0 ? 21 : 20),
                              .target = number(-1, number(0, 19) == 0 ? 50 : 49),
                              .target_logprobs = number(0, 20)});
    }
    plan.steps.push_back(step);
  }
  return plan;
}

class StageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(auto stage,
                         Stage::Create(*backend_, model_, 256,
                                       {.page_size = 16, .num_pages = 32, .dtype = DType::kF32}));
    stage_ = std::move(stage);
  }

  absl::StatusOr<IterationResult> TryRun(const IterationPlan& plan) {
    TREADLE_RETURN_IF_ERROR(stage_->Begin(plan));
    return stage_->Finish();
  }
  IterationResult Run(const IterationPlan& plan) {
    auto result = TryRun(plan);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : IterationResult();
  }

  // Token of greedy sampling after these ids.
  int32_t Greedy(const std::vector<int32_t>& ids) const {
    const uint32_t hash = PrefixModel::Hash(ids);
    int32_t best = 0;
    for (int32_t v = 1; v < model_.config().vocab; ++v) {
      if (PrefixModel::Logit(hash, v) > PrefixModel::Logit(hash, best)) best = v;
    }
    return best;
  }

  std::unique_ptr<Backend> backend_ = CreateReferenceBackend();
  PrefixModel model_;
  std::unique_ptr<Stage> stage_;
};

TEST_F(StageTest, FlattensAMixedBatch) {
  Run(PlanOf()
          .Start(StartOf(1, 3, {4}))
          .Start(StartOf(2, 20, {9, 2}))
          .Step(SampleOf(StepOf(1, 0, {11, 12, 13})))
          .Step(StepOf(2, 0, std::vector<int32_t>(15, 20))));
  // One running (its token carried), one in the middle of its prompt, one new: in this order.
  const IterationResult result = Run(PlanOf()
                                         .Start(StartOf(3, 4, {0}))
                                         .Step(SampleOf(StepOf(1, 3, {14})))
                                         .Step(StepOf(2, 15, {21, 22, 23}))
                                         .Step(SampleOf(StepOf(3, 0, {31, 32, 33, 34}))));
  ASSERT_EQ(model_.calls.size(), 2u);
  const PrefixModel::Call& call = model_.calls[1];
  EXPECT_THAT(call.token_ids, ElementsAre(/*seq1*/ 14, /*seq2*/ 21, 22, 23,
                                          /*seq3*/ 31, 32, 33, 34));
  EXPECT_THAT(call.positions, ElementsAre(/*seq1*/ 3, /*seq2*/ 15, 16, 17, /*seq3*/ 0, 1, 2, 3));
  EXPECT_THAT(call.spans, ElementsAre(/*seq1*/ Span{0, 1, 3, {4}}, /*seq2*/ Span{1, 3, 15, {9, 2}},
                                      /*seq3*/ Span{4, 4, 0, {0}}));
  // Only the rows that give output reach the head: one of sequence 1, none of 2, the last of 3.
  EXPECT_THAT(model_.head_rows, ElementsAre(1, 2));
  ASSERT_EQ(result.steps.size(), 3u);
  EXPECT_EQ(result.steps[0].token(), Greedy({11, 12, 13, 14}));
  EXPECT_EQ(result.steps[1].token(), -1);
  EXPECT_EQ(result.steps[2].token(), Greedy({31, 32, 33, 34}));
  EXPECT_EQ(result.steps[2].sequence, 3u);
}

TEST_F(StageTest, AStepWithoutTokensRunsThePreviousSample) {
  const int32_t first =
      Run(PlanOf().Start(StartOf(1, 2, {3})).Step(SampleOf(StepOf(1, 0, {7, 8})))).steps[0].token();
  const int32_t second = Run(PlanOf().Step(SampleOf(PreviousSample(1, 2)))).steps[0].token();
  EXPECT_THAT(model_.calls[1].token_ids, ElementsAre(first));
  EXPECT_THAT(model_.calls[1].positions, ElementsAre(2));
  EXPECT_EQ(second, Greedy({7, 8, first}));
}

TEST_F(StageTest, WritingDiscardsWhatLayThereOrLater) {
  Run(PlanOf().Start(StartOf(1, 4, {3})).Step(SampleOf(StepOf(1, 0, {1, 2, 3, 4}))));
  const IterationResult result = Run(PlanOf().Step(SampleOf(StepOf(1, 2, {9}))));
  EXPECT_EQ(result.steps[0].token(), Greedy({1, 2, 9}));
  EXPECT_EQ(Run(PlanOf().Step(SampleOf(StepOf(1, 3, {5})))).steps[0].token(), Greedy({1, 2, 9, 5}));
}

// A sequence that begins behind pages of others looks at what they hold, not at who filled them.
TEST_F(StageTest, RowsThatAreNotThereAreNamed) {
  std::vector<int32_t> prompt(20);
  std::iota(prompt.begin(), prompt.end(), 1);
  Run(PlanOf().Start(StartOf(1, 20, {0, 1})).Step(SampleOf(StepOf(1, 0, prompt))));
  SequenceStart second = StartOf(2, 20, {0, 5});
  second.first_position = 16;
  second.earlier_tokens = {prompt.begin(), prompt.begin() + 16};
  const Step rest = SampleOf(StepOf(2, 16, {prompt.begin() + 16, prompt.end()}));
  EXPECT_EQ(Run(PlanOf().Start(second).Step(rest)).steps[0].token(), Greedy(prompt));

  const auto error = [&](const SequenceStart& start, Step step) {
    step.sequence = start.sequence;
    return std::string(stage_->Begin(PlanOf().Start(start).Step(step)).message());
  };
  SequenceStart other = second;
  other.sequence = 3;
  other.earlier_tokens[7] = 40;  // other tokens than the page's, from 7 on
  EXPECT_THAT(error(other, rest), HasSubstr("sequence 3 do not hold its row at position 7"));
  other = second;
  other.sequence = 4;
  other.pages[PageKind::kWhole] = {1, 5};  // the page of other positions
  EXPECT_THAT(error(other, rest), HasSubstr("sequence 4 do not hold its row at position 0"));
  other.sequence = 5;
  other.pages[PageKind::kWhole] = {9, 5};  // a page that nobody wrote
  EXPECT_THAT(error(other, rest), HasSubstr("sequence 5 do not hold its row at position 0"));
}

// A plan gives a page before another sequence of it writes there, and only if it holds the rows it
// is asked for. What was given brings them to any page.
TEST_F(StageTest, PagesThatAreGivenCanBeLoaded) {
  std::vector<int32_t> prompt(20);
  std::iota(prompt.begin(), prompt.end(), 1);
  Run(PlanOf().Start(StartOf(1, 20, {0, 1})).Step(SampleOf(StepOf(1, 0, prompt))));
  uint64_t tag = 0;
  for (int32_t id = 1; id <= 16; ++id) tag = NextTag(tag, id);
  IterationPlan stores = PlanOf()
                             .Release(1)
                             .Start(StartOf(2, 16, {0}))
                             .Step(SampleOf(StepOf(2, 0, std::vector<int32_t>(16, 40))));
  stores.page_stores = {{0, tag}, {0, tag + 1}, {1, 0}, {9, 0}};
  const auto given = Run(stores).stored_pages;
  ASSERT_EQ(given.size(), 4u);
  EXPECT_FALSE(given[0].empty());
  EXPECT_TRUE(given[1].empty()) << "of other rows";
  EXPECT_TRUE(given[2].empty()) << "it is not whole";
  EXPECT_TRUE(given[3].empty()) << "nobody wrote it";

  SequenceStart second = StartOf(3, 20, {7, 5});
  second.first_position = 16;
  second.earlier_tokens = {prompt.begin(), prompt.begin() + 16};
  IterationPlan load =
      PlanOf().Start(second).Step(SampleOf(StepOf(3, 16, {prompt.begin() + 16, prompt.end()})));
  load.page_loads = {{3, 0, given[0]}};
  EXPECT_EQ(Run(load).steps[0].token(), Greedy(prompt));

  load = PlanOf().Start(StartOf(4, 20, {8, 9}));
  load.starts[0].first_position = 16;
  load.starts[0].earlier_tokens = second.earlier_tokens;
  load.page_loads = {{4, 0, {std::byte{1}}}};
  EXPECT_THAT(std::string(stage_->Begin(load).message()),
              HasSubstr("page load 0 of sequence 4 has 1 bytes, expected "));
}

// Releases, page copies, starts, steps: a page that a release gives up is copied over and begun
// anew within one plan.
TEST_F(StageTest, AppliesReleasesCopiesStartsAndStepsInThisOrder) {
  std::vector<int32_t> prompt(20);
  std::iota(prompt.begin(), prompt.end(), 1);
  Run(PlanOf()
          .Start(StartOf(1, 20, {0, 1}))
          .Start(StartOf(2, 1, {5}))
          .Step(SampleOf(StepOf(1, 0, prompt)))
          .Step(SampleOf(StepOf(2, 0, {40}))));
  SequenceStart candidate = StartOf(2, 20, {0, 5});  // shares page 0; page 5 was sequence 2's
  candidate.first_position = 19;
  candidate.candidate = 1;
  candidate.earlier_tokens = {prompt.begin(), prompt.begin() + 19};
  const IterationResult result =
      Run(PlanOf().Release(2).Copy(1, 5).Start(candidate).Step(SampleOf(StepOf(2, 19, {20}))));
  EXPECT_EQ(result.steps[0].token(), Greedy(prompt));
  // The candidates go on apart.
  const IterationResult apart =
      Run(PlanOf().Step(SampleOf(StepOf(1, 20, {41}))).Step(SampleOf(StepOf(2, 20, {42}))));
  std::vector<int32_t> first = prompt, second = prompt;
  first.push_back(41);
  second.push_back(42);
  EXPECT_EQ(apart.steps[0].token(), Greedy(first));
  EXPECT_EQ(apart.steps[1].token(), Greedy(second));
}

TEST_F(StageTest, PromptLogprobsRunInTilesAndJoinAcrossChunks) {
  std::vector<int32_t> prompt(150);
  for (int32_t i = 0; i < 150; ++i) prompt[i] = (i * 7) % 50;
  const Step step = ScoredOf(StepOf(1, 0, {prompt.begin(), prompt.begin() + 140}), prompt[140], 2);
  const Step rest =
      SampleOf(ScoredOf(StepOf(1, 140, {prompt.begin() + 140, prompt.end()}), -1, 2), 3);
  std::vector<int32_t> pages = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  const IterationResult first = Run(PlanOf().Start(StartOf(1, 150, pages)).Step(step));
  const IterationResult second = Run(PlanOf().Step(rest));
  EXPECT_THAT(model_.head_rows, ElementsAre(/*first*/ 64, 64, 12, /*second*/ 10));
  ASSERT_EQ(first.steps[0].outputs.size(), 140u);
  ASSERT_EQ(second.steps[0].outputs.size(), 10u);
  EXPECT_EQ(first.steps[0].token(), -1);
  EXPECT_EQ(second.steps[0].token(), Greedy(prompt));
  const TokenDetail& sampled = second.steps[0].outputs.back().detail;
  EXPECT_EQ(sampled.top.size(), 3u);
  EXPECT_EQ(sampled.top[0].token, second.steps[0].token());

  for (int32_t i = 0; i + 1 < 150; ++i) {
    const TokenDetail& detail =
        (i < 140 ? first.steps[0].outputs[i] : second.steps[0].outputs[i - 140]).target;
    const std::vector<int32_t> prefix(prompt.begin(), prompt.begin() + i + 1);
    const uint32_t hash = PrefixModel::Hash(prefix);
    double sum = 0;
    for (int32_t v = 0; v < 50; ++v) sum += std::exp(double{PrefixModel::Logit(hash, v)});
    const double expected = PrefixModel::Logit(hash, prompt[i + 1]) - std::log(sum);
    // The result is a float of magnitude below 16: half a unit in the last place is 2^-21.
    EXPECT_NEAR(detail.logprob, expected, 0x1p-19) << i;
    ASSERT_EQ(detail.top.size(), 2u);
    EXPECT_EQ(detail.top[0].token, Greedy(prefix));
  }
}

TEST_F(StageTest, ARowCanGiveEverythingAtOnce) {
  Step step = StepOf(1, 0, {1, 2});
  step.outputs = {{.row = 0, .target = 2, .target_logprobs = 4},
                  {.row = 1,
                   .sample = true,
                   .hidden = true,
                   .top_logprobs = 0,
                   .target = 9,
                   .target_logprobs = 4}};
  const IterationResult result = Run(PlanOf().Start(StartOf(1, 3, {0})).Step(step));
  ASSERT_EQ(result.steps[0].outputs.size(), 2u);
  const RowResult& first = result.steps[0].outputs[0];
  const RowResult& second = result.steps[0].outputs[1];
  EXPECT_EQ(first.token, -1);
  EXPECT_EQ(first.target.top[0].token, Greedy({1}));
  EXPECT_TRUE(first.hidden.empty());
  EXPECT_EQ(second.token, Greedy({1, 2}));
  EXPECT_TRUE(second.detail.top.empty());
  EXPECT_EQ(second.target.top.size(), 4u);
  EXPECT_LE(second.target.logprob, second.detail.logprob);
  EXPECT_EQ(std::ssize(second.hidden), model_.config().hidden);
}

// Rows before the last one are sampled as if they were the last.
TEST_F(StageTest, EveryRowCanBeSampled) {
  const std::vector<int32_t> ids = {5, 6, 7, 8, 9};
  SequenceStart start = StartOf(1, 3, {0});
  start.sampling.frequency_penalty = 2.0f;
  start.sampling.presence_penalty = 2.0f;
  start.min_new_tokens = 2;
  start.end_tokens = {Greedy({5, 6, 7}), Greedy({5, 6, 7, 8}), Greedy(ids)};
  Step all = StepOf(1, 0, ids);
  for (int32_t row = 2; row < 5; ++row) all.outputs.push_back({.row = row, .sample = true});
  const IterationResult together = Run(PlanOf().Start(start).Step(all));
  ASSERT_EQ(together.steps[0].outputs.size(), 3u);
  for (int32_t rows = 3; rows <= 5; ++rows) {
    start.sequence = static_cast<SequenceId>(rows);
    start.pages[PageKind::kWhole] = {rows};
    const Step alone = SampleOf(StepOf(start.sequence, 0, {ids.begin(), ids.begin() + rows}));
    EXPECT_EQ(together.steps[0].outputs[rows - 3].token,
              Run(PlanOf().Start(start).Step(alone)).steps[0].token());
  }
  // The last row's sample is what a step without tokens runs.
  const int32_t next = together.steps[0].token();
  const int32_t after = Run(PlanOf().Step(SampleOf(PreviousSample(1, 5)))).steps[0].token();
  EXPECT_EQ(after, Run(PlanOf().Step(SampleOf(StepOf(1, 5, {next})))).steps[0].token());
}

TEST_F(StageTest, EndTokensAreSuppressedUntilMinNewTokens) {
  const std::vector<int32_t> prompt = {5, 6, 7};
  SequenceStart start = StartOf(1, 3, {0});
  start.end_tokens = {Greedy(prompt)};
  start.min_new_tokens = 1;
  const int32_t token =
      Run(PlanOf().Start(start).Step(SampleOf(StepOf(1, 0, prompt)))).steps[0].token();
  EXPECT_NE(token, Greedy(prompt));
  // The second token may be any.
  const std::vector<int32_t> longer = {5, 6, 7, token};
  start.sequence = 2;
  start.pages[PageKind::kWhole] = {1};
  start.end_tokens = {Greedy(prompt), Greedy(longer)};
  Run(PlanOf().Start(start).Step(SampleOf(StepOf(2, 0, prompt))));
  EXPECT_EQ(Run(PlanOf().Step(SampleOf(StepOf(2, 3, {token})))).steps[0].token(), Greedy(longer));
}

TEST_F(StageTest, ARepetitionPenaltyCountsEveryEnteredToken) {
  const std::vector<int32_t> prompt = {5, 6, 7};
  SequenceStart start = StartOf(1, 3, {0});
  start.sampling.frequency_penalty = 2.0f;
  start.sampling.presence_penalty = 2.0f;
  std::vector<int32_t> ids = prompt;
  Step step = StepOf(1, 0, prompt);
  PlanOf plan;
  plan.Start(start);
  for (int i = 0; i < 12; ++i) {
    const uint32_t hash = PrefixModel::Hash(ids);
    int32_t expected = -1;
    float best = -1e9f;
    for (int32_t v = 0; v < 50; ++v) {
      const auto n = std::count(ids.begin() + 3, ids.end(), v);
      const float logit = PrefixModel::Logit(hash, v) - 2.0f * n - (n > 0 ? 2.0f : 0.0f);
      if (logit > best) best = logit, expected = v;
    }
    const int32_t token = Run(plan.Step(SampleOf(step))).steps[0].token();
    EXPECT_EQ(token, expected) << i;
    ids.push_back(token);
    step = PreviousSample(1, 3 + i);
    plan = PlanOf();
  }
}

TEST_F(StageTest, APlanWithoutStepsDoesNotTouchTheModel) {
  Run(PlanOf().Start(StartOf(1, 3, {0})));
  const IterationResult result = Run(PlanOf(1, 5).Release(1));
  EXPECT_TRUE(model_.calls.empty());
  EXPECT_EQ(result.iteration, 5u);
  EXPECT_TRUE(result.steps.empty());
}

TEST_F(StageTest, ABadPlanTouchesNothing) {
  Run(PlanOf().Start(StartOf(1, 3, {0})).Step(SampleOf(StepOf(1, 0, {1, 2, 3}))));
  const auto bad =
      TryRun(PlanOf().Release(1).Copy(1, 0).Start(StartOf(2, 3, {1})).Step(StepOf(3, 0, {1})));
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(model_.calls.size(), 1u);
  EXPECT_EQ(Run(PlanOf().Step(SampleOf(StepOf(1, 3, {4})))).steps[0].token(), Greedy({1, 2, 3, 4}));
}

// Every plan is refused or run, and none reaches outside (the sanitizers watch).
TEST_F(StageTest, AnyPlanIsRefusedOrRun) {
  std::mt19937 random(3);
  std::map<SequenceId, int32_t> next_positions;
  int run = 0;
  constexpr int kPlans = 20000;
  for (int i = 0; i < kPlans; ++i) {
    const IterationPlan plan = RandomPlan(random, next_positions);
    const auto result = TryRun(plan);
    if (!result.ok()) continue;
    ++run;
    ASSERT_EQ(result->steps.size(), plan.steps.size());
    for (const SequenceStart& start : plan.starts) {
      next_positions[start.sequence] = start.first_position;
    }
    for (const Step& step : plan.steps) {
      next_positions[step.sequence] = step.first_position + step.num_tokens;
    }
  }
  EXPECT_GT(run, kPlans / 20);
  EXPECT_LT(run, kPlans);
}

TEST_F(StageTest, ResetForgetsTheSequences) {
  Run(PlanOf().Start(StartOf(1, 3, {0})));
  stage_->BeginEpoch(nullptr, nullptr);
  EXPECT_EQ(TryRun(PlanOf().Release(1)).status().code(), absl::StatusCode::kNotFound);
  Run(PlanOf().Start(StartOf(1, 3, {0})));
}

TEST_F(StageTest, OptionsOutOfRangeAreNamed) {
  const auto message = [&](int64_t tokens, const KvCache::Options& kv) {
    return std::string(Stage::Create(*backend_, model_, tokens, kv).status().message());
  };
  EXPECT_THAT(message(0, {.num_pages = 1}), HasSubstr("max_batch_tokens is 0"));
  EXPECT_THAT(message(1, {.num_pages = 0}), HasSubstr("number of pages is 0"));
  EXPECT_THAT(message(1, {.page_size = 24, .num_pages = 1}), HasSubstr("page size is 24"));
  EXPECT_THAT(message(1, {.num_pages = 1, .dtype = DType::kBF16}),
              HasSubstr("element type is bf16, expected f16, f32 or int8"));
}

}  // namespace
}  // namespace treadle
