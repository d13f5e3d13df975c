// The loop in named situations: who runs, and how a request may end in each of its states.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/status.h"
#include "tests/scheduler/loop_harness.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

HarnessOptions Manual(int depth = 1) {
  HarnessOptions options;
  options.engine.manual = true;
  options.engine.record = true;
  options.engine.depth = depth;
  return options;
}

TEST(Loop, GivesIncrementsTheirTokensFirstAndChunksPrompts) {
  HarnessOptions options = Manual();
  options.limits = {.max_batch_size = 3, .max_batch_tokens = 8};
  LoopHarness harness(options);
  harness.Submit(LoopHarness::Spec(2, 9, 0));
  harness.Turn();
  harness.Submit(LoopHarness::Spec(12, 4, 1));
  harness.Submit(LoopHarness::Spec(5, 4, 2));
  for (int i = 0; i < 4; ++i) {
    harness.CompleteAndTurn();
  }
  std::vector<std::vector<int32_t>> tokens;
  for (const IterationPlan& plan : harness.engine.TakePlans()) {
    tokens.emplace_back();
    for (const Step& step : plan.steps) tokens.back().push_back(step.num_tokens);
  }
  EXPECT_THAT(tokens, ElementsAre(ElementsAre(2), ElementsAre(1, 7), ElementsAre(1, 5, 2),
                                  ElementsAre(1, 1, 3), ElementsAre(1, 1, 1)));
  harness.RunToIdle();
}

// A prompt in chunks beside one that generates, at both depths: a vector, no token, all pages back.
TEST(Loop, AnEmbeddingComesWithTheEndOfItsPrompt) {
  for (const int depth : {1, 2}) {
    HarnessOptions options;
    options.engine.depth = depth;
    options.engine.record = true;
    options.limits = {.max_batch_size = 3, .max_batch_tokens = 8};
    LoopHarness harness(options);
    harness.Submit(LoopHarness::Spec(3, 9, 0));
    RequestSpec spec = LoopHarness::Spec(21, 1, 1);
    spec.pooling = Pooling::kMean;
    ASSERT_OK_AND_ASSIGN(const auto submitted, harness.pool.Submit(spec));
    harness.RunToIdle();
    const StreamBatch batch = submitted.stream->Take();
    EXPECT_TRUE(batch.ended && batch.status.ok());
    ASSERT_EQ(batch.tokens.size(), 1u);
    EXPECT_EQ(batch.tokens[0].token, -1);
    EXPECT_EQ(batch.tokens[0].finish, FinishReason::kPooled);
    EXPECT_EQ(batch.tokens[0].embedding, ReferenceEmbedding(spec.prompt));
    const LedgerEnd end = harness.EndOf(submitted.id);
    EXPECT_EQ(end.prompt_tokens, 21);
    EXPECT_EQ(end.output_tokens, 0);
    EXPECT_EQ(end.reason, "stop");
    std::set<SequenceId> pooled;
    int32_t tokens = 0;
    for (const IterationPlan& plan : harness.engine.TakePlans()) {
      for (const SequenceStart& start : plan.starts) {
        if (start.mean_pooling) pooled.insert(start.sequence);
      }
      for (const Step& step : plan.steps) {
        if (pooled.contains(step.sequence)) tokens += step.num_tokens;
      }
    }
    EXPECT_EQ(tokens, 21);
  }
}

// A request that is admitted, but has had no iteration yet, waits: autoscalers go by that number.
TEST(Loop, RequestsThatOnlyHoldPagesWait) {
  HarnessOptions options = Manual();
  options.limits = {.max_batch_size = 3, .max_batch_tokens = 8};
  LoopHarness harness(options);
  const auto expect = [&](int64_t waiting, int64_t reserved, int64_t running) {
    const PoolLoad load = harness.pool.Load();
    EXPECT_EQ(load.waiting, waiting);
    EXPECT_EQ(load.reserved, reserved);
    EXPECT_EQ(load.running, running);
  };
  for (uint64_t seed = 0; seed < 4; ++seed) harness.Submit(LoopHarness::Spec(16, 2, seed));
  expect(4, 0, 0);
  harness.Turn();  // half of the first prompt; two more only reserve
  expect(3, 2, 1);
  harness.pool.Cancel(harness.clients[2]->id, absl::CancelledError("gone"));
  harness.clock.Advance(std::chrono::seconds(5));
  harness.Turn();
  expect(2, 1, 1);
  harness.CompleteAndTurn();  // the rest of the first prompt
  harness.CompleteAndTurn();
  EXPECT_EQ(harness.pool.Load().running, 2);
  harness.RunToIdle();
  expect(0, 0, 0);
  EXPECT_GE(harness.clients[1]->timings.queued, 5);
}

TEST(Loop, FirstThatDoesNotFitStopsAdmission) {
  HarnessOptions options = Manual();
  options.engine.total_pages = 6;  // of 4 tokens
  LoopHarness harness(options);
  harness.Submit(LoopHarness::Spec(8, 8, 0));  // 4 pages
  harness.Submit(LoopHarness::Spec(8, 4, 1));  // 3
  harness.Submit(LoopHarness::Spec(2, 2, 2));  // 1: would fit, must not overtake
  harness.Turn();
  EXPECT_EQ(harness.pool.Load().running, 1);
  EXPECT_EQ(harness.pool.Load().waiting, 2);
  EXPECT_EQ(harness.held_pages(), 4);
  harness.RunToIdle();
  for (const auto& client : harness.clients) EXPECT_TRUE(client->ended && client->status.ok());
}

// Five times as many come as can be answered. A request that does not fit is refused at once; what
// was accepted is answered whole, in iterations that are as full as they can be.
TEST(Loop, OverloadIsRefusedAtOnceAndCostsTheAcceptedNothing) {
  HarnessOptions options = Manual();
  options.max_queue = 8;
  LoopHarness harness(options);
  int64_t refused = 0;
  for (uint64_t turn = 0; turn < 500; ++turn) {
    for (uint64_t i = 0; i < 2; ++i) {  // four of ten tokens run: there is room for 0.4
      RequestSpec spec = LoopHarness::Spec(3, 10, 2 * turn + i);
      if (harness.pool.Load().waiting < options.max_queue) {
        harness.Submit(std::move(spec));
      } else {
        EXPECT_TRUE(absl::IsResourceExhausted(harness.pool.Submit(std::move(spec)).status()));
        ++refused;
      }
    }
    harness.Turn();
    EXPECT_LE(harness.pool.Load().waiting, options.max_queue);
    harness.engine.Complete();
  }
  const std::vector<IterationPlan> plans = harness.engine.TakePlans();
  for (const IterationPlan& plan : plans) EXPECT_LE(plan.steps.size(), 4u);
  const auto full = [](const IterationPlan& plan) { return plan.steps.size() == 4; };
  EXPECT_GE(std::ranges::count_if(plans, full), 0.9 * static_cast<double>(plans.size()));
  harness.RunToIdle();
  for (const auto& client : harness.clients) EXPECT_TRUE(client->ended && client->status.ok());
  EXPECT_EQ(refused + std::ssize(harness.clients), 1000);
  EXPECT_GT(refused, 700);
}

TEST(Loop, SecondPlanUsesThePreviousSampleAndALateResultIsDropped) {
  LoopHarness harness(Manual(2));
  RequestSpec spec = LoopHarness::Spec(3, 10, 5);
  spec.end_tokens = {ReferenceOutput(spec, 0)[0]};
  Client& client = harness.Submit(spec);
  harness.Turn();
  const std::vector<IterationPlan> plans = harness.engine.TakePlans();
  ASSERT_EQ(plans.size(), 2u);
  EXPECT_TRUE(plans[1].steps[0].tokens.empty());
  harness.CompleteAndTurn();
  EXPECT_TRUE(client.ended);
  EXPECT_THAT(client.finish, ElementsAre(FinishReason::kEndToken));
  EXPECT_GT(harness.held_pages()[PageKind::kWhole], 0)
      << "a plan in flight still names the request";
  harness.CompleteAndTurn();
  EXPECT_EQ(harness.held_pages(), 0);
  EXPECT_EQ(harness.EndOf(client.id).reason, "stop");
}

TEST(Loop, CandidatesShareThePromptAndDiffer) {
  for (const int32_t prompt : {1, 4, 5, 8, 11}) {
    for (const int depth : {1, 2}) {
      LoopHarness harness(Manual(depth));
      RequestSpec spec = LoopHarness::Spec(prompt, 6, 3);
      spec.candidates = 3;
      spec.sampling.presence_penalty = 0.5f;
      Client& client = harness.Submit(spec);
      harness.RunToIdle();
      EXPECT_TRUE(client.ended && client.status.ok());
      EXPECT_THAT(client.finish, testing::Each(FinishReason::kLength));
      EXPECT_NE(client.tokens[0], client.tokens[1]);
      EXPECT_EQ(harness.EndOf(client.id).output_tokens, 18);
      int64_t prompt_rows = 0;
      int64_t copies = 0;
      for (const IterationPlan& plan : harness.engine.TakePlans()) {
        copies += static_cast<int64_t>(plan.page_copies[PageKind::kWhole].size());
        for (const Step& step : plan.steps) {
          if (step.first_position < prompt) prompt_rows += step.num_tokens;
        }
      }
      EXPECT_EQ(prompt_rows, prompt + 2);  // the others recompute its last row
      EXPECT_EQ(copies, prompt % 4 == 1 ? 0 : 2);
    }
  }
}

TEST(Loop, PromptLogProbabilitiesComeInOrderOverChunks) {
  HarnessOptions options = Manual();
  options.limits = {.max_batch_size = 2, .max_batch_tokens = 5};
  LoopHarness harness(options);
  RequestSpec spec = LoopHarness::Spec(13, 2, 1);
  spec.prompt_logprobs = 0;
  Client& client = harness.Submit(spec);
  harness.RunToIdle();
  EXPECT_EQ(client.prompt.size(), 12u);
}

// A request ends early, in each of its states.

struct Moment {
  const char* name;
  void (*reach)(LoopHarness& harness);  // the second client is in that state
};

void Step(LoopHarness& harness, int plans) {
  for (int i = 0; i < plans; ++i) {
    harness.CompleteAndTurn();
  }
}

const Moment kMoments[] = {
    {"NotTaken", [](LoopHarness&) {}},
    {"Queued", [](LoopHarness& h) { h.Turn(); }},
    // The first client ends after 4 tokens; then the second runs its 20 prompt tokens in 3 chunks.
    {"FirstChunkInFlight", [](LoopHarness& h) { h.Turn(), Step(h, 4); }},
    {"InPrompt", [](LoopHarness& h) { h.Turn(), Step(h, 5); }},
    {"PromptEndInFlight", [](LoopHarness& h) { h.Turn(), Step(h, 6); }},
    {"Decoding", [](LoopHarness& h) { h.Turn(), Step(h, 8); }},
    {"LastStep", [](LoopHarness& h) { h.Turn(), Step(h, 9); }},
};

class EarlyEnd : public testing::TestWithParam<std::tuple<size_t, int>> {
 protected:
  EarlyEnd() : harness_(Options()) {
    harness_.Submit(LoopHarness::Spec(3, 4, 0));
    RequestSpec spec = LoopHarness::Spec(20, 4, 1);
    spec.deadline = harness_.clock.Now() + milliseconds(100);
    second_ = &harness_.Submit(spec);
    third_ = &harness_.Submit(LoopHarness::Spec(5, 3, 2));
    kMoments[std::get<0>(GetParam())].reach(harness_);
  }
  static HarnessOptions Options() {
    HarnessOptions options = Manual(std::get<1>(GetParam()));
    options.engine.total_pages = 7;  // the first (2) and the second (6) do not fit together
    options.limits = {.max_batch_size = 1, .max_batch_tokens = 8};
    return options;
  }
  // From here the request is in no further plan.
  void ExpectEnded(absl::StatusCode code, const char* reason) {
    harness_.engine.TakePlans();
    harness_.Turn();
    ASSERT_TRUE(second_->ended);
    EXPECT_EQ(second_->status.code(), code);
    harness_.RunToIdle();
    for (const IterationPlan& plan : harness_.engine.TakePlans()) {
      for (const SequenceStart& start : plan.starts) EXPECT_NE(start.sampling.seed, 1u);
      for (const treadle::Step& step : plan.steps) EXPECT_NE(step.num_tokens, 8);
    }
    harness_.clock.Advance(std::chrono::seconds(2));  // a heartbeat, for what nothing else carries
    harness_.RunToIdle();
    EXPECT_EQ(harness_.EndOf(second_->id).reason, reason);
    EXPECT_TRUE(third_->ended && third_->status.ok());
    EXPECT_EQ(harness_.engine.live_sequences(), 0);
  }

  LoopHarness harness_;
  Client* second_;
  Client* third_;
};

TEST_P(EarlyEnd, Cancel) {
  for (int i = 0; i < 3; ++i) {
    harness_.pool.Cancel(second_->id, absl::CancelledError(i == 0 ? "first" : "again"));
  }
  ExpectEnded(absl::StatusCode::kCancelled, "cancelled");
  EXPECT_EQ(second_->status.message(), "first");
  harness_.pool.Cancel(second_->id, absl::CancelledError("late"));
  harness_.pool.Cancel(999, absl::CancelledError("unknown"));
  harness_.RunToIdle();
}

TEST_P(EarlyEnd, Deadline) {
  harness_.clock.Advance(milliseconds(99));
  harness_.Turn();
  EXPECT_FALSE(second_->ended);
  harness_.clock.Advance(milliseconds(1));
  ExpectEnded(absl::StatusCode::kDeadlineExceeded, "deadline");
}

TEST_P(EarlyEnd, StopString) {
  harness_.pool.FinishCandidate(second_->id, 0);
  harness_.pool.FinishCandidate(second_->id, 0);
  harness_.pool.FinishCandidate(second_->id, 7);
  ExpectEnded(absl::StatusCode::kOk, "stop");
  EXPECT_THAT(second_->finish, ElementsAre(FinishReason::kStopString));
}

INSTANTIATE_TEST_SUITE_P(Moments, EarlyEnd,
                         testing::Combine(testing::Range(size_t{0}, std::size(kMoments)),
                                          testing::Values(1, 2)),
                         [](const auto& info) {
                           return Str(kMoments[std::get<0>(info.param)].name, "Depth",
                                      std::get<1>(info.param));
                         });

TEST(Loop, StopStringOutranksTheLoopsReason) {
  LoopHarness harness(Manual());
  RequestSpec spec = LoopHarness::Spec(3, 2, 0);
  spec.candidates = 2;
  Client& client = harness.Submit(spec);
  harness.Turn();
  Step(harness, 2);  // candidate 0 has both its tokens, candidate 1 one
  ASSERT_THAT(client.finish, ElementsAre(FinishReason::kLength, FinishReason::kNone));
  harness.pool.FinishCandidate(client.id, 0);
  harness.pool.FinishCandidate(client.id, 1);
  harness.RunToIdle();
  EXPECT_TRUE(client.ended && client.status.ok());
  EXPECT_EQ(harness.EndOf(client.id).reason, "stop");
}

TEST(Loop, ExpiredRequestNeverStarts) {
  LoopHarness harness(Manual());
  RequestSpec spec = LoopHarness::Spec(3, 2, 0);
  spec.deadline = harness.clock.Now();
  Client& client = harness.Submit(spec);
  harness.Turn();
  EXPECT_EQ(client.status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(harness.engine.TakePlans(), IsEmpty());
  EXPECT_EQ(harness.pool.Load().waiting, 0);
}

// The engine, drain, stop.

TEST(Loop, EngineFailureEndsWhatRanAndWaitingOnesStay) {
  HarnessOptions options = Manual(2);
  options.recover = false;
  options.engine.manual_restart = true;
  options.limits = {.max_batch_size = 1, .max_batch_tokens = 16};
  LoopHarness harness(options);
  Client& ran = harness.Submit(LoopHarness::Spec(3, 5, 0));
  Client& waited = harness.Submit(LoopHarness::Spec(3, 5, 1));
  harness.Turn();
  Step(harness, 2);
  harness.engine.Fail(absl::DeadlineExceededError("iteration 2 is late"));
  harness.Turn();
  EXPECT_EQ(ran.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(ran.status.message()), HasSubstr("iteration 2 is late"));
  EXPECT_EQ(harness.EndOf(ran.id).request, 0u) << "no record before the next result";
  EXPECT_FALSE(waited.ended);
  EXPECT_EQ(harness.pool.Load().waiting, 1);
  harness.engine.FinishRestart();
  harness.RunToIdle();
  EXPECT_TRUE(waited.ended && waited.status.ok());
  EXPECT_EQ(harness.EndOf(ran.id).reason, "error");
}

TEST(Loop, DrainFinishesTheQueueToo) {
  LoopHarness harness(Manual());
  for (uint64_t i = 0; i < 9; ++i) harness.Submit(LoopHarness::Spec(3, 3, i));
  harness.pool.Drain();
  EXPECT_EQ(harness.pool.Submit(LoopHarness::Spec(1, 1, 0)).status().code(),
            absl::StatusCode::kUnavailable);
  harness.Turn();
  EXPECT_FALSE(harness.loop->drained());
  harness.RunToIdle();
  EXPECT_TRUE(harness.loop->drained());
  for (const auto& client : harness.clients) EXPECT_TRUE(client->ended && client->status.ok());
}

TEST(Loop, EndAllEndsEveryRequestOnce) {
  for (const char* policy : {"fcfs", "request-level"}) {
    HarnessOptions options = Manual(2);
    options.policy = policy;
    LoopHarness harness(options);
    for (uint64_t i = 0; i < 6; ++i) harness.Submit(LoopHarness::Spec(3, 3, i));
    harness.Turn();
    Step(harness, 2);
    harness.Submit(LoopHarness::Spec(3, 3, 6));  // still in the inbox
    harness.loop->EndAll(absl::UnavailableError("stopping"));
    for (const auto& client : harness.clients) {
      client->Receive();
      EXPECT_EQ(client->status.code(), absl::StatusCode::kUnavailable);
      EXPECT_EQ(harness.EndOf(client->id).reason, "error");
    }
    EXPECT_EQ(harness.held_pages(), 0);
    EXPECT_THAT(harness.engine.violations(), IsEmpty());
  }
}

TEST(Loop, HeartbeatCarriesReleases) {
  LoopHarness harness(Manual());
  harness.Submit(LoopHarness::Spec(3, 1, 0));
  harness.RunToIdle();
  EXPECT_EQ(harness.engine.live_sequences(), 1);
  harness.clock.Advance(milliseconds(999));
  EXPECT_FALSE(harness.Turn());
  harness.clock.Advance(milliseconds(1));
  EXPECT_TRUE(harness.Turn());
  EXPECT_EQ(harness.engine.live_sequences(), 0);
  EXPECT_FALSE(harness.Turn()) << "one heartbeat per second";
}

// Request-level.

TEST(RequestLevelLoop, BatchesWholeRequestsAndDeliversAtTheEnd) {
  HarnessOptions options = Manual();
  options.policy = "request-level";
  options.limits = {.max_batch_size = 2, .max_batch_tokens = 64};
  LoopHarness harness(options);
  Client& quick = harness.Submit(LoopHarness::Spec(3, 1, 0));
  Client& slow = harness.Submit(LoopHarness::Spec(3, 3, 1));
  Client& next = harness.Submit(LoopHarness::Spec(3, 1, 2));
  harness.Turn();
  harness.clock.Advance(milliseconds(10));
  Step(harness, 2);
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("AB", "B", "B"));  // no row for who ended
  EXPECT_THAT(quick.tokens[0], IsEmpty());
  EXPECT_FALSE(quick.ended);
  harness.clock.Advance(milliseconds(10));
  Step(harness, 1);
  EXPECT_TRUE(quick.ended && slow.ended && !next.ended);
  EXPECT_EQ(quick.tokens[0].size(), 1u);
  EXPECT_DOUBLE_EQ(quick.timings.first_token, 0.02);  // what its client waited
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("C"));
  harness.RunToIdle();
}

}  // namespace
}  // namespace treadle
