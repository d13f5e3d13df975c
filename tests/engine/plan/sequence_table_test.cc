#include "engine/plan/sequence_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "kernels/op_cases/instrumented.h"
#include "tests/engine/plan_builder.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

// A table of 8 pages of 16 slots, a vocabulary of 100, a context of 90.
SequenceTable::Limits SmallLimits() {
  return {.page_size = 16, .num_pages = 8, .vocab = 100, .context = 90, .max_batch_tokens = 40};
}

void Apply(SequenceTable& table, const IterationPlan& plan) {
  ASSERT_EQ(table.Check(plan), absl::OkStatus());
  for (const SequenceId id : plan.releases) table.Release(id);
  ASSERT_EQ(table.Start(plan.starts), absl::OkStatus());
  for (const Step& step : plan.steps) {
    LiveSequence& sequence = table.At(step.sequence);
    const int32_t sample = sequence.previous_sample();
    sequence.Enter(step.first_position,
                   step.tokens.empty() ? std::span(&sample, 1) : std::span(step.tokens));
  }
}

void ExpectBad(SequenceTable& table, const IterationPlan& plan, absl::StatusCode code,
               const std::string& part) {
  const size_t size = table.size();
  const absl::Status status = table.Check(plan);
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  EXPECT_EQ(table.size(), size);
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;

TEST(LiveSequence, EntersAndDiscards) {
  LiveSequence sequence(StartOf(1, 4, {0, 1}), 32);
  sequence.Enter(0, std::vector<int32_t>{5, 6, 7, 8});
  sequence.SetSample(9);
  EXPECT_EQ(sequence.previous_sample(), 9);
  sequence.Enter(2, std::vector<int32_t>{1});
  EXPECT_EQ(sequence.previous_sample(), -1);
  EXPECT_THAT(sequence.ids(), ::testing::ElementsAre(5, 6, 1));
  EXPECT_TRUE(sequence.counts().empty());  // nobody asked for them
}

TEST(LiveSequence, BeginsPastZeroWithEarlierTokens) {
  SequenceStart start = StartOf(1, 4, {0});
  start.first_position = 3;
  start.earlier_tokens = {7, 8, 7};
  start.sampling.presence_penalty = 1;
  const LiveSequence sequence(start, 16);
  EXPECT_THAT(sequence.ids(), ::testing::ElementsAre(7, 8, 7));
  ASSERT_EQ(sequence.counts().size(), 2u);
  EXPECT_EQ(sequence.counts()[0].in_prompt, 2);
}

// Invariant 2: whatever was entered and rewritten, the counts are the tally of the ids.
TEST(LiveSequence, CountsEqualATallyOfTheIds) {
  std::mt19937 random(7);
  SequenceStart start = StartOf(1, 20, {0, 1, 2, 3});
  start.sampling.repetition_penalty = 1.1f;
  LiveSequence sequence(start, 64);
  for (int turn = 0; turn < 3000; ++turn) {
    const int64_t first = random() % (sequence.next_position() + 1);
    const int64_t count = random() % (std::min<int64_t>(8, sequence.capacity() - first) + 1);
    std::vector<int32_t> ids(count);
    for (int32_t& id : ids) id = random() % 12;
    sequence.Enter(first, ids);
    std::map<int32_t, std::pair<int, int>> tally;
    for (int64_t p = 0; p < sequence.next_position(); ++p) {
      auto& [in_prompt, in_output] = tally[sequence.ids()[p]];
      ++(p < 20 ? in_prompt : in_output);
    }
    ASSERT_EQ(sequence.counts().size(), tally.size());
    auto expected = tally.begin();
    for (const TokenCount& count : sequence.counts()) {
      ASSERT_EQ(count.token, expected->first);
      ASSERT_EQ(count.in_prompt, expected->second.first);
      ASSERT_EQ(count.in_output, expected->second.second);
      ++expected;
    }
  }
}

TEST(SequenceTable, AcceptsALifeAndItsReleaseInOnePlanWithARestartOfTheId) {
  SequenceTable table(SmallLimits());
  Apply(table, PlanOf().Start(StartOf(1, 3, {0})).Step(StepOf(1, 0, {1, 2, 3})));
  table.At(1).SetSample(50);
  Apply(table, PlanOf().Step(PreviousSample(1, 3)));
  EXPECT_THAT(table.At(1).ids(), ::testing::ElementsAre(1, 2, 3, 50));
  Apply(table, PlanOf().Release(1).Start(StartOf(1, 2, {5})).Step(StepOf(1, 0, {9, 9})));
  EXPECT_THAT(table.At(1).ids(), ::testing::ElementsAre(9, 9));
  Apply(table, PlanOf().Release(1));
  EXPECT_EQ(table.size(), 0u);
}

TEST(SequenceTable, NamesUnknownAndDuplicateSequences) {
  SequenceTable table(SmallLimits());
  Apply(table, PlanOf().Start(StartOf(1, 3, {0})));
  ExpectBad(table, PlanOf().Release(2), kNotFound, "release of unknown sequence 2");
  ExpectBad(table, PlanOf().Release(1).Release(1), kInvalid, "sequence 1 is released twice");
  ExpectBad(table, PlanOf().Step(StepOf(2, 0, {1})), kNotFound, "step of unknown sequence 2");
  ExpectBad(table, PlanOf().Start(StartOf(1, 3, {1})), kInvalid, "sequence 1, which is live");
  ExpectBad(table, PlanOf().Start(StartOf(2, 3, {1})).Start(StartOf(2, 3, {2})), kInvalid,
            "sequence 2 is started twice");
  ExpectBad(table, PlanOf().Release(1).Step(StepOf(1, 0, {1})), kInvalid,
            "step of sequence 1, which the same plan releases");
  ExpectBad(table, PlanOf().Step(StepOf(1, 0, {1})).Step(StepOf(1, 1, {1})), kInvalid,
            "sequence 1 has two steps");
  ExpectBad(table,
            PlanOf().Start(StartOf(3, 3, {1})).Step(StepOf(3, 0, {1})).Step(StepOf(3, 1, {1})),
            kInvalid, "sequence 3 has two steps");
  // A check that failed leaves no trace: the same sequence can still be used.
  Apply(table, PlanOf().Step(StepOf(1, 0, {1})));
}

TEST(SequenceTable, NamesPagesAndPositionsOutOfRange) {
  SequenceTable table(SmallLimits());
  ExpectBad(table, PlanOf().Start(StartOf(1, 3, {8})), kInvalid, "page 8 (of 1)");
  ExpectBad(table, PlanOf().Start(StartOf(1, 3, {-1})), kInvalid, "expected 0 to 7");
  ExpectBad(table, PlanOf().Start(StartOf(1, 3, {})), kInvalid, "context hold 0 positions");
  ExpectBad(table, PlanOf().Start(StartOf(1, 0, {1})), kInvalid, "prompt length is 0");
  ExpectBad(table, PlanOf().Copy(0, 8), kInvalid, "page copy to 8");
  ExpectBad(table, PlanOf().Copy(-2, 1), kInvalid, "page copy from -2");
  SequenceStart late = StartOf(1, 3, {0});
  late.first_position = -1;
  ExpectBad(table, PlanOf().Start(late), kInvalid, "first position is -1, expected 0 or more");
  // Behind its prompt, too: what was produced before counts as that.
  late.first_position = 5;
  late.earlier_tokens = {1, 2, 3, 4, 4};
  late.sampling.presence_penalty = 1;
  Apply(table, PlanOf().Start(late).Step(StepOf(1, 5, {4})));
  EXPECT_EQ(table.At(1).counts().back().in_output, 3);
  Apply(table, PlanOf().Release(1));

  Apply(table, PlanOf().Start(StartOf(1, 3, {0})).Start(StartOf(2, 90, {1, 2, 3, 4, 5, 6})));
  ExpectBad(table, PlanOf().Step(StepOf(1, 1, {1})), kInvalid, "first position is 1, expected 0");
  ExpectBad(table, PlanOf().Step(StepOf(1, -1, {1})), kInvalid, "first position is -1");
  ExpectBad(table, PlanOf().Step(StepOf(1, 0, std::vector<int32_t>(17, 1))), kInvalid,
            "positions up to 16, but its pages and the model's context hold 16");
  ExpectBad(table, PlanOf().Step(StepOf(2, 0, std::vector<int32_t>(41, 1))), kInvalid,
            "plan has 41 tokens, expected at most 40");
  for (const int first : {0, 40, 80}) {
    const int count = std::min(40, 90 - first);
    Apply(table, PlanOf().Step(StepOf(2, first, std::vector<int32_t>(count, 1))));
  }
  ExpectBad(table, PlanOf().Step(StepOf(2, 90, {1})), kInvalid, "the model's context hold 90");
}

TEST(SequenceTable, NamesPagesThatCannotBeStoredOrLoaded) {
  SequenceTable table(SmallLimits());
  Apply(table, PlanOf().Start(StartOf(1, 40, {0, 1, 2})));
  IterationPlan plan;
  plan.page_stores = {{7, 0}, {8, 0}};
  ExpectBad(table, plan, kInvalid, "page store 8");
  SequenceStart start = StartOf(2, 40, {3, 4, 5});
  start.first_position = 33;
  start.earlier_tokens.assign(33, 1);
  const auto loads = [&](std::vector<PageLoad> loads) {
    IterationPlan plan = PlanOf().Start(start);
    plan.page_loads = std::move(loads);
    return plan;
  };
  ExpectBad(table, loads({{1, 0}}), kNotFound, "page load of sequence 1, which the plan does not");
  ExpectBad(table, loads({{2, 2}}), kInvalid, "page load 2 of sequence 2, expected one of the 2");
  ExpectBad(table, loads({{2, -1}}), kInvalid, "page load -1 of sequence 2");
  Apply(table, loads({{2, 0}, {2, 1}}));
}

TEST(SequenceTable, NamesTokensThatCannotBe) {
  SequenceTable table(SmallLimits());
  Apply(table, PlanOf().Start(StartOf(1, 3, {0})));
  ExpectBad(table, PlanOf().Step(StepOf(1, 0, {100})), kInvalid, "token 100 of sequence 1");
  ExpectBad(table, PlanOf().Step(StepOf(1, 0, {-1})), kInvalid, "outside the vocabulary");
  Step uneven = StepOf(1, 0, {1, 2});
  uneven.num_tokens = 3;
  ExpectBad(table, PlanOf().Step(uneven), kInvalid, "2 token ids, expected 3");
  Step none = StepOf(1, 0, {});
  ExpectBad(table, PlanOf().Step(none), kInvalid, "0 tokens, expected at least 1");
  none.num_tokens = 2;
  ExpectBad(table, PlanOf().Step(none), kInvalid, "no token ids for 2 tokens");
  ExpectBad(table, PlanOf().Step(PreviousSample(1, 0)), kInvalid, "there is none for that");
  const auto asks = [](std::vector<RowOutput> outputs) {
    Step step = StepOf(1, 0, {1, 2});
    step.outputs = std::move(outputs);
    return IterationPlan(PlanOf().Step(step));
  };
  ExpectBad(table, asks({{.row = 0}}), kInvalid, "output of row 0 asks for nothing");
  ExpectBad(table, asks({{.row = 2, .sample = true}}), kInvalid,
            "output of row 2, expected rows of 2");
  ExpectBad(table, asks({{.row = 1, .sample = true}, {.row = 1, .hidden = true}}), kInvalid,
            "output of row 1, expected rows of 2 in ascending order");
  ExpectBad(table, asks({{.row = -1, .sample = true}}), kInvalid, "output of row -1");
  ExpectBad(table, asks({{.row = 0, .masked = true, .hidden = true}}), kInvalid, "samples nothing");
  ExpectBad(table, asks({{.row = 0, .target = 100}}), kInvalid, "target 100");
  ExpectBad(table, asks({{.row = 0, .sample = true, .top_logprobs = kMaxTopLogprobs + 1}}),
            kInvalid, "21 and 0 log probabilities");
  ExpectBad(table, asks({{.row = 0, .target = 1, .target_logprobs = -1}}), kInvalid,
            "-1 and -1 log probabilities");
  IterationPlan replicas = PlanOf();
  replicas.replicas = {0, 1};
  ExpectBad(table, replicas, kInvalid, "names replicas");

  SequenceStart start = StartOf(2, 3, {1});
  start.end_tokens = {100};
  ExpectBad(table, PlanOf().Start(start), kInvalid, "end token 100");
  start.end_tokens = {};
  start.sampling.logit_bias = {{.token = -5, .bias = 1}};
  ExpectBad(table, PlanOf().Start(start), kInvalid, "logit bias for token -5");
  start.sampling.logit_bias = {};
  start.first_position = 2;
  ExpectBad(table, PlanOf().Start(start), kInvalid, "0 earlier tokens, expected one for each");
  start.earlier_tokens = {1};
  ExpectBad(table, PlanOf().Start(start), kInvalid, "1 earlier tokens");
  start.earlier_tokens = {1, 2};
  EXPECT_EQ(table.Check(PlanOf().Start(start)), absl::OkStatus());
}

TEST(SequenceTable, NamesMoreSequencesThanPages) {
  SequenceTable table(SmallLimits());
  PlanOf full;
  for (int i = 0; i < 8; ++i) full.Start(StartOf(i, 3, {i}));
  Apply(table, full);
  ExpectBad(table, PlanOf().Start(StartOf(8, 3, {0})), kInvalid,
            "plan starts 1 sequences, and has 9 live then, expected at most 8");
  Apply(table, PlanOf().Release(3).Start(StartOf(8, 3, {3})));
  PlanOf many;
  for (int i = 0; i < 10'000; ++i) many.Start(StartOf(100 + i, 3, {0}));
  ExpectBad(table, many, kInvalid, "plan starts 10000 sequences, and has 10008 live then");
}

TEST(SequenceTable, NamesMoreEntriesThanTokens) {
  SequenceTable table(SmallLimits());
  SequenceStart start = StartOf(1, 3, {0});
  start.end_tokens.assign(101, 5);
  ExpectBad(table, PlanOf().Start(start), kInvalid, "101 end tokens, expected at most one for");
  start.end_tokens.clear();
  start.sampling.logit_bias.assign(101, {.token = 5, .bias = 1});
  ExpectBad(table, PlanOf().Start(start), kInvalid, "101 logit biases, expected at most one for");
}

// A context of 2^46 positions: no machine has the addresses for the ids.
TEST(SequenceTable, NoMemoryForASequenceStartsNoneOfThePlan) {
  if (kInstrumented) GTEST_SKIP() << "sanitizers end the process";
  SequenceTable::Limits limits = SmallLimits();
  limits.page_size = limits.context = int64_t{1} << 46;
  SequenceTable table(limits);
  EXPECT_EQ(table.Check(PlanOf().Start(StartOf(1, 3, {0}))), absl::OkStatus());
  const absl::Status status = table.Start(std::vector{StartOf(1, 3, {0}), StartOf(2, 3, {1})});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no memory for sequence 1 of at most"));
  EXPECT_EQ(table.size(), 0u);
}

// A ring of three pages of 16, a window of 20.
TEST(SequenceTable, NamesWhatARingDoesNotHold) {
  SequenceTable::Limits limits = SmallLimits();
  limits.num_pages = {0, 8};
  limits.window = 20;
  SequenceTable table(limits);
  const std::vector<int32_t> ring = {4, 2, 7, 4, 2, 7};
  ExpectBad(table, PlanOf().Start(StartOf(1, 3, {1}, ring)), kInvalid,
            "1 pages and 6 of a window, expected at most 0 and 6");
  ExpectBad(table, PlanOf().Start(StartOf(1, 3, {}, {4, 2, 7, 4, 7, 2})), kInvalid,
            "page 7 of a window at 4, expected a ring of 3 pages, which has 2");
  ExpectBad(table, PlanOf().Start(StartOf(1, 3, {}, {0, 8})), kInvalid, "page 8 (of 1)");
  ExpectBad(table, PlanOf().Start(StartOf(1, 3, {}, std::vector<int32_t>(7, 1))), kInvalid,
            "expected at most 0 and 6");
  ExpectBad(table, PlanOf().Copy(0, 8, PageKind::kWindow), kInvalid, "page copy to 8");
  ExpectBad(table, PlanOf().Copy(0, 1), kInvalid, "page copy from 0 (of 1) is not a page");

  Apply(table, PlanOf().Start(StartOf(1, 90, {}, ring)));
  const auto step = [](int32_t first, int32_t count) {
    return PlanOf().Step(StepOf(1, first, std::vector<int32_t>(count, 1)));
  };
  Apply(table, step(0, 40));
  // The first row sees from 21 on: the last may be at 21 + 48 - 1.
  ExpectBad(table, step(40, 30), kInvalid,
            "position 40 looks back to 21, but its ring of 48 positions holds nothing before 22");
  Apply(table, step(40, 29));
  // Written to 69: one that goes back finds what it sees from 21 on.
  ExpectBad(table, step(39, 1), kInvalid, "position 39 looks back to 20");
  Apply(table, step(40, 1));
  ExpectBad(table, step(39, 1), kInvalid, "position 39 looks back to 20");

  limits.num_pages = {8, 8};
  SequenceTable both(limits);
  ExpectBad(both, PlanOf().Start(StartOf(1, 3, {1}, {4, 2})), kInvalid,
            "1 pages and 2 of a window, expected as many");
}

// A candidate that shares pages must not write before its first position.
TEST(SequenceTable, ACandidateDoesNotRewriteWhatItShares) {
  SequenceTable table(SmallLimits());
  SequenceStart start = StartOf(1, 20, {0, 1});
  start.first_position = 19;
  start.earlier_tokens.assign(19, 3);
  Apply(table, PlanOf().Start(start).Step(StepOf(1, 19, {4})));
  ExpectBad(table, PlanOf().Step(StepOf(1, 18, {4})), kInvalid, "expected 19 to 20");
  Apply(table, PlanOf().Step(StepOf(1, 19, {5})));
}

// Sums must add everything once.
TEST(SequenceTable, APooledStepIsThePromptsNextPart) {
  SequenceTable table(SmallLimits());
  SequenceStart start = StartOf(1, 9, {0});
  start.mean_pooling = true;
  start.first_position = 1;
  start.earlier_tokens = {1};
  ExpectBad(table, PlanOf().Start(start), kInvalid, "expected 0 (it is pooled)");
  start.first_position = 0;
  start.earlier_tokens.clear();
  Apply(table, PlanOf().Start(start).Step(StepOf(1, 0, {1, 2, 3})));
  ExpectBad(table, PlanOf().Step(StepOf(1, 2, {3})), kInvalid, "expected the tokens that");
  ExpectBad(table, PlanOf().Step(SampleOf(StepOf(1, 3, {4}), 0)), kInvalid, "is pooled");
  ExpectBad(table, PlanOf().Step(HiddenOf(ScoredOf(StepOf(1, 3, {4, 5}), -1, 0))), kInvalid,
            "is pooled");
  table.At(1).SetSample(4);
  ExpectBad(table, PlanOf().Step(PreviousSample(1, 3)), kInvalid, "is pooled");
  Apply(table, PlanOf().Step(HiddenOf(StepOf(1, 3, {4, 5}))));
}

TEST(SequenceTable, ARewriteVoidsThePreviousSample) {
  SequenceTable table(SmallLimits());
  Apply(table, PlanOf().Start(StartOf(1, 3, {0})).Step(StepOf(1, 0, {1, 2, 3})));
  table.At(1).SetSample(4);
  ExpectBad(table, PlanOf().Step(PreviousSample(1, 2)), kInvalid, "at 2, but there is none");
  Apply(table, PlanOf().Step(StepOf(1, 2, {9})));
  ExpectBad(table, PlanOf().Step(PreviousSample(1, 3)), kInvalid, "at 3, but there is none");
}

}  // namespace
}  // namespace treadle
