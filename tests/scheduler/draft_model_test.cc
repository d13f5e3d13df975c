// A draft model beside the served one: what it saves, what it keeps, and what happens without it.
// (Tokens are the same in any case: loop_property_test.)
#include "scheduler/speculation/draft_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/loop_harness.h"

namespace treadle {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

HarnessOptions Options(uint64_t wrong_every = 0) {
  HarnessOptions options;
  options.engine.record = true;
  options.engine.total_pages = 256;
  options.limits.max_batch_tokens = 64;
  FakeEngineOptions& draft = options.draft_engine.emplace();
  draft.drafts = true;
  draft.depth = 4;
  draft.total_pages = 256;
  draft.max_batch_tokens = 64;
  draft.record = true;
  draft.wrong_every = wrong_every;
  return options;
}

RequestSpec Drafted(int32_t prompt, int32_t max_new, uint64_t seed) {
  RequestSpec spec = LoopHarness::Spec(prompt, max_new, seed);
  spec.speculate = Speculate::kDraft;
  return spec;
}

// Runs the request alone, and gives how many plans of the served engine that took.
size_t PlansOf(LoopHarness& harness, RequestSpec spec) {
  harness.engine.TakePlans();
  const Client& client = harness.Submit(std::move(spec));
  harness.RunToIdle();
  EXPECT_EQ(client.status, absl::OkStatus());
  size_t plans = 0;
  for (const IterationPlan& plan : harness.engine.TakePlans()) plans += plan.steps.empty() ? 0 : 1;
  return plans;
}

TEST(DraftModel, SavesIterations) {
  LoopHarness harness(Options());
  // The prompt, its first token's successor, and sixteen tokens a plan once it is known to be good.
  EXPECT_LE(PlansOf(harness, Drafted(9, 200, 5)), 30);
  const RequestTimings& counts = harness.EndOf(harness.clients[0]->id).timings;
  EXPECT_GT(counts.draft_tokens, 150);
  EXPECT_EQ(counts.accepted_draft_tokens, counts.draft_tokens);
}

// It has no soft prompt: it guesses as if there were none.
TEST(DraftModel, RunsTheTextAlone) {
  LoopHarness harness(Options());
  RequestSpec spec = Drafted(9, 20, 5);
  spec.virtual_tokens = 4;
  const std::vector<int32_t> text(spec.text().begin(), spec.text().end());
  harness.draft_engine->TakePlans();  // which measure it
  PlansOf(harness, std::move(spec));
  size_t starts = 0;
  for (const IterationPlan& plan : harness.draft_engine->TakePlans()) {
    starts += plan.starts.size();
    for (const SequenceStart& start : plan.starts) EXPECT_EQ(start.prompt_length, 5);
    if (plan.starts.empty()) continue;
    EXPECT_THAT(std::span(plan.steps[0].tokens).first(5), testing::ElementsAreArray(text));
  }
  EXPECT_EQ(starts, 1u);
}

// After a wrong guess it goes on from what the sequence really has: else it would hardly be right
// again. Three of four guesses are.
TEST(DraftModel, RunsWhatCameInsteadOfAWrongGuess) {
  LoopHarness harness(Options(/*wrong_every=*/4));
  EXPECT_LT(PlansOf(harness, Drafted(9, 500, 5)), 250);
  const RequestTimings& counts = harness.EndOf(harness.clients[0]->id).timings;
  EXPECT_GT(counts.draft_tokens, 300);
  EXPECT_GT(counts.accepted_draft_tokens, counts.draft_tokens / 2);
}

TEST(DraftModel, IsHardlyAskedOnceItIsWrong) {
  LoopHarness harness(Options(/*wrong_every=*/1));
  EXPECT_EQ(PlansOf(harness, Drafted(9, 500, 5)), 500);
  harness.draft_engine->TakePlans();
  // The next request begins with what is known of it.
  EXPECT_EQ(PlansOf(harness, Drafted(9, 200, 6)), 200);
  EXPECT_THAT(harness.draft_engine->TakePlans(), SizeIs(testing::Le(10u)));
}

TEST(DraftModel, RunsForSeveralSequencesAtOnce) {
  HarnessOptions options = Options();
  options.engine.manual = true;  // all of them come before the first plan ends
  LoopHarness harness(options);
  for (uint64_t seed = 0; seed < 4; ++seed) harness.Submit(Drafted(6, 60, seed));
  harness.RunToIdle();
  size_t together = 0;
  for (const IterationPlan& plan : harness.draft_engine->TakePlans()) {
    together += plan.steps.size() == 4 ? 1 : 0;
  }
  EXPECT_GT(together, 10u);
}

TEST(DraftModel, KeepsWhatItHasRunOfAPrompt) {
  LoopHarness harness(Options());
  RequestSpec first = Drafted(20, 12, 5);
  PlansOf(harness, first);
  harness.draft_engine->TakePlans();
  RequestSpec second = first;  // a conversation that goes on
  for (const int32_t token : harness.clients[0]->tokens[0]) second.prompt.push_back(token);
  second.prompt.push_back(3);
  second.cache_salt = "";
  PlansOf(harness, second);
  std::vector<int32_t> begins;
  for (const IterationPlan& plan : harness.draft_engine->TakePlans()) {
    for (const SequenceStart& start : plan.starts) begins.push_back(start.first_position);
  }
  ASSERT_THAT(begins, SizeIs(1));
  EXPECT_GE(begins[0], 24);  // whole pages of 4, of the 31 that it had as inputs
  second.cache_salt = "another tenant's";
  PlansOf(harness, second);
  for (const IterationPlan& plan : harness.draft_engine->TakePlans()) {
    for (const SequenceStart& start : plan.starts) EXPECT_EQ(start.first_position, 0);
  }
}

// Then requests speculate as without it.
TEST(DraftModel, GuessesNothingWithoutRoom) {
  HarnessOptions options = Options();
  options.draft_engine->total_pages = 4;
  LoopHarness harness(options);
  EXPECT_EQ(PlansOf(harness, Drafted(9, 60, 5)), 60);
  EXPECT_LT(PlansOf(harness, Drafted(4, 12, 5)), 12) << "16 tokens have room";
}

TEST(DraftModel, GuessesNothingBeyondItsContext) {
  HarnessOptions options = Options();
  options.draft_context = 20;
  LoopHarness harness(options);
  EXPECT_LT(PlansOf(harness, Drafted(4, 60, 5)), 55);
  EXPECT_EQ(PlansOf(harness, Drafted(24, 30, 6)), 30);
}

TEST(DraftModel, IsGivenUpWhenItsEngineFails) {
  HarnessOptions options = Options();
  options.engine.manual = true;
  LoopHarness harness(options);
  const Client& client = harness.Submit(Drafted(9, 100, 5));
  for (int i = 0; i < 6; ++i) {
    harness.Turn();
    harness.engine.Complete();
  }
  harness.draft_engine->Fail(absl::InternalError("lost its memory"));
  harness.RunToIdle();
  EXPECT_EQ(client.status, absl::OkStatus());
  ASSERT_THAT(harness.draft_failures, SizeIs(1));
  EXPECT_THAT(harness.draft_failures[0].message(), HasSubstr("lost its memory"));
}

}  // namespace
}  // namespace treadle
