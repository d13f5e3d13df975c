// The baseline's schedule, held against ORCA's figures, drawn as tables: a row for each plan, with
// its members as letters and its rows of padding.

#include "scheduler/faster_transformer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "tests/scheduler/loop_harness.h"

namespace treadle {
namespace {

using testing::ElementsAre;

HarnessOptions Baseline(int stages, const BatchLimits& limits,
                        const std::string& policy = "faster-transformer") {
  HarnessOptions options;
  options.policy = policy;
  options.engine.manual = true;
  options.engine.record = true;
  options.engine.stages = options.engine.depth = stages;
  options.limits = limits;
  options.prefix_cache = false;
  return options;
}

// Every plan since the last call, as "AB 2+1 -1": its members, each one's rows, its padding. An
// iteration is complete before the next plan is looked at.
std::vector<std::string> Table(LoopHarness& harness) {
  std::vector<std::string> table;
  uint64_t next = harness.ledger.end(), lost = 0;
  std::vector<std::string> plans;
  for (bool busy = true; busy;) {
    busy = harness.Turn();
    for (const IterationPlan& plan : harness.engine.TakePlans()) {
      std::string names, rows;
      for (const SequenceStart& start : plan.starts) {
        harness.seeds[start.sequence] = start.sampling.seed;
      }
      for (const Step& step : plan.steps) {
        names += static_cast<char>('A' + static_cast<int>(harness.seeds.at(step.sequence)));
        rows += Str(rows.empty() ? "" : "+", step.num_tokens);
      }
      if (!names.empty()) plans.push_back(Str(names, " ", rows));
    }
    busy = harness.engine.Complete() || busy;
  }
  for (const auto& record : harness.ledger.Read(next, 1 << 16, lost)) {
    if (record->members.empty()) continue;
    table.push_back(
        Str(plans[table.size()], record->padding > 0 ? Str(" -", record->padding) : ""));
  }
  return table;
}

// Figure 3: two requests with inputs of two tokens ("I think", "I love"); x1 generates four tokens
// with its end of text ("this is great"), x2 two ("you"), and is computed for two iterations more.
TEST(FasterTransformer, Figure3) {
  LoopHarness harness(Baseline(1, {.max_batch_size = 2, .max_batch_tokens = 64}));
  Client& x1 = harness.Submit(LoopHarness::Spec(2, 4, 0));
  Client& x2 = harness.Submit(LoopHarness::Spec(2, 2, 1));
  EXPECT_THAT(Table(harness), ElementsAre("AB 2+2",  // iter 1
                                          "AB 1+1",  // iter 2
                                          "A 1 -1",  // iter 3: x2 is inactive
                                          "A 1 -1"));
  EXPECT_EQ(x1.tokens[0].size(), 4u);
  EXPECT_EQ(x2.tokens[0].size(), 2u);
}

// Section 3.2: the engine returns results when all of the batch has ended, and who comes meanwhile
// waits until then.
TEST(FasterTransformer, NobodyLeavesOrJoinsARunningBatch) {
  LoopHarness harness(Baseline(1, {.max_batch_size = 2, .max_batch_tokens = 64}));
  Client& longer = harness.Submit(LoopHarness::Spec(2, 3, 0));
  Client& shorter = harness.Submit(LoopHarness::Spec(2, 1, 1));
  harness.Turn();
  Client& late = harness.Submit(LoopHarness::Spec(2, 1, 2));
  for (int iteration = 0; iteration < 2; ++iteration) {
    harness.CompleteAndTurn();
    EXPECT_FALSE(shorter.ended) << iteration;
    EXPECT_TRUE(shorter.tokens[0].empty()) << iteration;
    EXPECT_TRUE(late.tokens[0].empty()) << iteration;
  }
  harness.CompleteAndTurn();
  EXPECT_TRUE(shorter.ended);
  EXPECT_TRUE(longer.ended);
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("AB", "A", "A", "C"));
}

// Figure 4's requests x3 (two input tokens) and x4 (three) in one batch. Section 6.2: "for the
// first iteration of the batch" all have the input length of the shortest one; x4's last input
// token runs beside x3's increment.
TEST(FasterTransformer, Figure4LongerPromptsGoOnATokenAnIteration) {
  LoopHarness harness(Baseline(1, {.max_batch_size = 4, .max_batch_tokens = 64}));
  harness.Submit(LoopHarness::Spec(2, 2, 0));
  harness.Submit(LoopHarness::Spec(3, 2, 1));
  EXPECT_THAT(Table(harness), ElementsAre("AB 2+2",    // x31 x32, x41 x42
                                          "AB 1+1",    // x33, and x43
                                          "B 1 -1"));  // x44; x3 has ended
}

// The same where prompts are padded to the longest one.
TEST(FasterTransformer, Figure4Padded) {
  LoopHarness harness(
      Baseline(1, {.max_batch_size = 4, .max_batch_tokens = 64}, "faster-transformer-padded"));
  harness.Submit(LoopHarness::Spec(2, 2, 0));
  harness.Submit(LoopHarness::Spec(3, 2, 1));
  EXPECT_THAT(Table(harness), ElementsAre("AB 2+3 -1", "AB 1+1"));
}

// Figure 8b: three workers; the batch AB is split into the microbatches A and B, and C is not
// injected before AB has ended.
TEST(FasterTransformer, Figure8b) {
  LoopHarness harness(
      Baseline(3, {.max_batch_size = 2, .max_batch_tokens = 64, .microbatch_size = 1}));
  for (uint64_t i = 0; i < 3; ++i) harness.Submit(LoopHarness::Spec(3, 2, i));
  harness.Turn();
  EXPECT_EQ(harness.engine.running_plans(), 2) << "the third worker idles: a bubble";
  for (const char* next : {"A", "B"}) {  // A2 enters when A1 has left the last worker
    EXPECT_FALSE(harness.Turn());
    harness.CompleteAndTurn();
    EXPECT_EQ(harness.engine.running_plans(), 2) << next;
  }
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("A", "B", "A", "B"));
  harness.CompleteAndTurn();
  EXPECT_EQ(harness.engine.running_plans(), 1) << "B2 runs, and C waits for it";
  harness.CompleteAndTurn();
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("C"));
  harness.RunToIdle();
}

// A microbatch of which nothing lives is computed until the batch ends, too.
TEST(FasterTransformer, EndedMicrobatchesArePadding) {
  LoopHarness harness(
      Baseline(2, {.max_batch_size = 4, .max_batch_tokens = 64, .microbatch_size = 2}));
  for (uint64_t i = 0; i < 4; ++i) harness.Submit(LoopHarness::Spec(2, i == 3 ? 3 : 1, i));
  EXPECT_THAT(Table(harness), ElementsAre("AB 2+2", "CD 2+2", "D 1 -3", "D 1 -3"));
}

// The rows of each plan where padding is run, too.
std::vector<int64_t> RowsWithPadding(HarnessOptions options,
                                     const std::vector<RequestSpec>& specs) {
  options.compute_padding = true;
  LoopHarness harness(options);
  for (const RequestSpec& spec : specs) harness.Submit(spec);
  harness.RunToIdle();
  std::vector<int64_t> rows;
  for (const IterationPlan& plan : harness.engine.TakePlans()) {
    if (!plan.steps.empty()) rows.push_back(plan.num_tokens());
  }
  return rows;
}

TEST(FasterTransformer, PaddingIsRunWhereThatIsAsked) {
  const BatchLimits halves{.max_batch_size = 4, .max_batch_tokens = 64, .microbatch_size = 2};
  std::vector<RequestSpec> specs;
  for (uint64_t i = 0; i < 4; ++i) specs.push_back(LoopHarness::Spec(2, i == 3 ? 3 : 1, i));
  EXPECT_THAT(RowsWithPadding(Baseline(2, halves), specs), ElementsAre(4, 4, 4, 4));
  // As far as a plan has room: 2 + 9 rows, and 7 of padding.
  const BatchLimits narrow{.max_batch_size = 2, .max_batch_tokens = 12};
  specs = {LoopHarness::Spec(2, 1, 0), LoopHarness::Spec(9, 2, 1)};
  EXPECT_THAT(RowsWithPadding(Baseline(1, narrow, "faster-transformer-padded"), specs),
              ElementsAre(12, 2));
}

// Section 6.1: K/V for the longest sequence that the model can have is reserved for every request,
// "which grows in proportion to the max sequence length of the model".
TEST(FasterTransformer, ReservesTheWorstCase) {
  HarnessOptions options =
      Baseline(1, {.max_batch_size = 8, .max_batch_tokens = 64, .max_context = 64});
  options.engine.total_pages = 40;  // of 4 tokens: two requests of 64, and half another one
  LoopHarness harness(options);
  for (uint64_t i = 0; i < 3; ++i) harness.Submit(LoopHarness::Spec(2, 1, i));
  EXPECT_THAT(Table(harness), ElementsAre("AB 2+2", "C 2"));
}

}  // namespace
}  // namespace treadle
