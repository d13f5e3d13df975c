// The loop over an engine with several stages: who is in which plan, what an error in the middle of
// the pipeline leaves behind, and what the ledger says of bubbles.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/status.h"
#include "tests/scheduler/loop_harness.h"

namespace treadle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

HarnessOptions Pipeline(int stages, int64_t max_batch_size) {
  HarnessOptions options;
  options.engine.manual = true;
  options.engine.record = true;
  options.engine.stages = stages;
  options.engine.depth = stages;
  options.limits = {.max_batch_size = max_batch_size, .max_batch_tokens = 64};
  return options;
}

// ORCA, Figure 8a: three workers, a batch size of two.
TEST(Pipeline, KeepsThreeStagesBusyInArrivalOrder) {
  LoopHarness harness(Pipeline(3, 2));
  for (uint64_t i = 0; i < 6; ++i) harness.Submit(LoopHarness::Spec(3, 5, i));
  harness.Turn();
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("AB", "CD", "EF"));
  for (int round = 0; round < 4; ++round) {
    for (const char* next : {"AB", "CD", "EF"}) {
      EXPECT_FALSE(harness.Turn()) << "nobody may run twice";
      harness.CompleteAndTurn();
      EXPECT_THAT(harness.TakePlanNames(), ElementsAre(next));
    }
  }
  harness.RunToIdle();
  for (const auto& client : harness.clients) EXPECT_TRUE(client->ended && client->status.ok());
}

// A later request takes the place of one that left.
TEST(Pipeline, ANewcomerJoinsTheNextPlanWithRoom) {
  LoopHarness harness(Pipeline(3, 2));
  for (uint64_t i = 0; i < 5; ++i) harness.Submit(LoopHarness::Spec(3, i == 2 ? 1 : 9, i));
  harness.Turn();
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("AB", "CD", "E"));
  harness.Submit(LoopHarness::Spec(3, 9, 5));
  for (const char* next : {"AB", "DF", "E", "AB", "DF"}) {  // C ends with its first token
    harness.CompleteAndTurn();
    EXPECT_THAT(harness.TakePlanNames(), ElementsAre(next));
  }
}

// A literal Algorithm 1 would put all of them into the first plan.
TEST(Pipeline, SharesRequestsOutOverStages) {
  LoopHarness harness(Pipeline(3, 8));
  for (uint64_t i = 0; i < 5; ++i) harness.Submit(LoopHarness::Spec(3, 3, i));
  harness.Turn();
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("AB", "CD", "E"));
}

// Over all small sizes: a plan has at most its share, which is no larger than keeps the pipeline
// full; everybody is in exactly one plan; and nobody gets ahead.
TEST(Pipeline, EveryStageHasWorkAndEveryRequestItsTurn) {
  for (int stages = 2; stages <= 4; ++stages) {
    for (int64_t size = 1; size <= 3; ++size) {
      for (int64_t requests = 1; requests <= 14; ++requests) {
        SCOPED_TRACE(Str(stages, " stages, batch size ", size, ", ", requests, " requests"));
        LoopHarness harness(Pipeline(stages, size));
        for (int64_t i = 0; i < requests; ++i) {
          harness.Submit(LoopHarness::Spec(1, 9, static_cast<uint64_t>(i)));
        }
        harness.Turn();
        const int64_t share = std::min<int64_t>(size, (requests + stages - 1) / stages);
        const int64_t full = std::min<int64_t>(stages, (requests + share - 1) / share);
        EXPECT_EQ(harness.engine.running_plans(), full);
        int64_t members = 0;
        for (const std::string& name : harness.TakePlanNames()) {
          EXPECT_LE(static_cast<int64_t>(name.size()), share);
          members += static_cast<int64_t>(name.size());
        }
        EXPECT_EQ(members, std::min(requests, share * stages));
        for (int64_t i = 0; i < 3 * full; ++i) {
          harness.CompleteAndTurn();
          EXPECT_EQ(harness.engine.running_plans(), full);
        }
        harness.RunToIdle();
        for (const auto& client : harness.clients) EXPECT_TRUE(client->status.ok());
      }
    }
  }
}

TEST(Pipeline, AnErrorInTheMiddleEndsWhatRanAndKeepsWhatWaits) {
  HarnessOptions options = Pipeline(3, 2);
  options.recover = false;
  options.engine.manual_restart = true;
  options.engine.total_pages = 6;
  LoopHarness harness(options);
  for (uint64_t i = 0; i < 8; ++i) harness.Submit(LoopHarness::Spec(1, 3, i));  // a page each
  harness.Turn();
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("AB", "CD", "EF"));
  harness.CompleteAndTurn();  // AB have a token, and are on their way again
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("AB"));
  harness.engine.Complete();  // CD's result is there when the error comes, and is lost with it
  harness.engine.Fail(absl::UnavailableError("worker 1 of 3 is gone"));
  harness.Turn();
  for (size_t i = 0; i < 8; ++i) {
    SCOPED_TRACE(i);
    const Client& client = *harness.clients[i];
    EXPECT_EQ(client.ended, i < 6);
    if (i >= 6) continue;
    EXPECT_EQ(client.status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(client.status.message()), HasSubstr("worker 1 of 3 is gone"));
    EXPECT_EQ(client.tokens[0].size(), i < 2 ? 1u : 0u);
  }
  EXPECT_EQ(harness.held_pages(), 0);
  EXPECT_EQ(harness.pool.Load().waiting, 2);
  EXPECT_THAT(harness.TakePlanNames(), IsEmpty()) << "no plan before the next epoch stands";
  harness.engine.FinishRestart();
  harness.Turn();
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("G", "H"));
  harness.RunToIdle();
  for (size_t i = 6; i < 8; ++i) EXPECT_TRUE(harness.clients[i]->status.ok());
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(harness.EndOf(harness.clients[i]->id).reason, "error");
}

TEST(Pipeline, AfterAnErrorInTheMiddleStreamsGoOn) {
  HarnessOptions options = Pipeline(3, 2);
  options.engine.manual_restart = true;
  options.engine.total_pages = 6;
  LoopHarness harness(options);
  for (uint64_t i = 0; i < 8; ++i) harness.Submit(LoopHarness::Spec(1, 3, i));  // a page each
  harness.Turn();
  harness.CompleteAndTurn();  // AB have a token, and are on their way again
  harness.engine.Fail(absl::UnavailableError("worker 1 of 3 is gone"));
  harness.Turn();
  harness.TakePlanNames();
  EXPECT_EQ(harness.pool.Load().running, 6);
  EXPECT_EQ(harness.held_pages(), 6) << "who runs keeps its pages";
  harness.engine.FinishRestart();
  harness.Turn();
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("AB", "CD", "EF")) << "in the order of arrival";
  harness.RunToIdle();
  for (const auto& client : harness.clients) EXPECT_TRUE(client->ended && client->status.ok());
}

// It may be what ends the epochs: who has company in it loses no more than it does.
TEST(Pipeline, ARequestDoesNotEndEpochsForEver) {
  HarnessOptions options = Pipeline(2, 1);
  LoopHarness harness(options);
  Client& client = harness.Submit(LoopHarness::Spec(3, 3, 0));
  const auto fail = [&](int times) {
    for (int i = 0; i < times; ++i) {
      EXPECT_FALSE(client.ended);
      harness.engine.Fail(absl::UnavailableError("worker 1 of 2 is gone"));
      harness.Turn();
    }
  };
  harness.Turn();
  fail(kMaxEpochs);
  harness.CompleteAndTurn();  // something new
  ASSERT_EQ(client.tokens[0].size(), 1u);
  for (int i = 0; i <= kMaxEpochs; ++i) {
    fail(1);
    harness.CompleteAndTurn();  // it has caught up, and runs something new
  }
  EXPECT_EQ(client.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client.status.message()), HasSubstr("worker 1 of 2 is gone"));
}

// A request that only runs known tokens again is hardly why.
TEST(Pipeline, WhoCatchesUpMayLoseMoreEpochs) {
  HarnessOptions options = Pipeline(2, 1);
  LoopHarness harness(options);
  RequestSpec spec = LoopHarness::Spec(30, 3, 0);  // two chunks
  spec.candidates = 2;
  Client& client = harness.Submit(spec);
  harness.Turn();
  harness.CompleteAndTurn();
  harness.engine.Fail(absl::UnavailableError("worker 1 of 2 is gone"));  // in the second one
  for (int i = 0; i < 3 * kMaxEpochs; ++i) {
    harness.Turn();
    harness.engine.Fail(absl::UnavailableError("worker 1 of 2 is gone"));
  }
  harness.RunToIdle();
  EXPECT_TRUE(client.ended && client.status.ok()) << client.status;
}

TEST(Pipeline, NobodyWaitsForAnEngineThatDoesNotComeBack) {
  HarnessOptions options = Pipeline(2, 1);
  options.recover = false;
  options.engine.manual_restart = true;
  LoopHarness harness(options);
  for (uint64_t i = 0; i < 3; ++i) harness.Submit(LoopHarness::Spec(3, 3, i));
  const auto fail = [&] {
    harness.engine.Fail(absl::UnavailableError("worker 1 of 2 is gone"));
    harness.Turn();
  };
  harness.clock.Advance(2 * LoopCore::kRestartPatience);  // a long iteration is none in vain
  harness.Turn();
  harness.clock.Advance(2 * LoopCore::kRestartPatience);
  fail();
  EXPECT_TRUE(harness.clients[1]->ended && !harness.clients[2]->ended);
  for (int i = 0; i < 5; ++i) fail();
  harness.clock.Advance(LoopCore::kRestartPatience - std::chrono::milliseconds(1));
  fail();
  EXPECT_FALSE(harness.clients[2]->ended);
  harness.clock.Advance(std::chrono::milliseconds(1));
  Client& late = harness.Submit(LoopHarness::Spec(3, 3, 3));
  fail();
  for (const Client* client : {harness.clients[2].get(), &late}) {
    ASSERT_TRUE(client->ended);
    EXPECT_EQ(client->status.code(), absl::StatusCode::kUnavailable);
  }
  // It does come back, and what failed before is forgotten.
  harness.engine.FinishRestart();
  Client& next = harness.Submit(LoopHarness::Spec(3, 3, 4));
  Client& waits = harness.Submit(LoopHarness::Spec(3, 3, 5));
  harness.Submit(LoopHarness::Spec(3, 3, 6));
  harness.Turn();
  fail();
  EXPECT_TRUE(next.ended && waits.ended && !harness.clients.back()->ended);
  harness.engine.FinishRestart();
  harness.RunToIdle();
  EXPECT_TRUE(harness.clients.back()->status.ok());
}

TEST(Pipeline, AnEngineThatIsGivenUpEndsEveryRequest) {
  std::vector<absl::Status> reasons;
  HarnessOptions options = Pipeline(2, 1);
  options.give_up = [&](const absl::Status& status) { reasons.push_back(status); };
  LoopHarness harness(options);
  for (uint64_t i = 0; i < 4; ++i) harness.Submit(LoopHarness::Spec(3, 3, i));
  harness.Turn();
  harness.Submit(LoopHarness::Spec(3, 3, 4));  // not seen by the loop yet
  harness.engine.Fail(absl::UnavailableError("worker 1 of 2 is gone"));
  harness.RunToIdle();
  for (const auto& client : harness.clients) {
    ASSERT_TRUE(client->ended);
    EXPECT_EQ(client->status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(client->status.message()), HasSubstr("worker 1 of 2 is gone"));
  }
  EXPECT_EQ(harness.engine.epoch(), 1u) << "it was restarted";
  EXPECT_EQ(harness.pool.Submit(LoopHarness::Spec(1, 1, 9)).status().code(),
            absl::StatusCode::kUnavailable);
  harness.clock.Advance(std::chrono::seconds(2));
  harness.RunToIdle();
  ASSERT_EQ(reasons.size(), 1u);
  EXPECT_THAT(std::string(reasons[0].message()), HasSubstr("worker 1 of 2 is gone"));
  EXPECT_TRUE(harness.loop->drained());
  EXPECT_EQ(harness.held_pages(), 0);
}

std::vector<std::shared_ptr<const LedgerRecord>> Records(const LoopHarness& harness) {
  uint64_t next = 0;
  uint64_t lost = 0;
  return harness.ledger.Read(next, 1 << 16, lost);
}

// The gap before an iteration is a bubble if its plan was under way before the one before it ended,
// and idleness if not.
TEST(PipelineLedger, TellsBubblesFromIdleness) {
  LoopHarness harness(Pipeline(2, 1));
  harness.engine.SetTimings({.queue = 1, .receive = 2, .compute = 3, .sample = 4, .gap = 5});
  harness.Submit(LoopHarness::Spec(1, 2, 0));
  harness.Turn();
  harness.Submit(LoopHarness::Spec(1, 1, 1));
  harness.Turn();  // behind A's first plan
  harness.RunToIdle();
  harness.Submit(LoopHarness::Spec(1, 1, 2));  // nothing in flight
  harness.RunToIdle();
  std::vector<double> bubbles;
  for (const auto& record : Records(harness)) {
    EXPECT_EQ(record->stages, 2);
    EXPECT_EQ(record->receive, 2);
    bubbles.push_back(record->bubble);
  }
  // A alone, B behind it, A again behind B, C alone.
  EXPECT_THAT(bubbles, ElementsAre(0, 5, 5, 0));
}

TEST(PipelineLedger, WhatFollowsAHeartbeatWasNotBehindWork) {
  LoopHarness harness(Pipeline(2, 1));
  harness.clock.Advance(std::chrono::seconds(2));
  harness.Turn();
  EXPECT_EQ(harness.engine.running_plans(), 1);  // without steps
  harness.engine.SetTimings({.gap = 5});
  harness.Submit(LoopHarness::Spec(1, 1, 0));
  harness.Turn();
  EXPECT_EQ(harness.engine.running_plans(), 2);
  harness.RunToIdle();
  for (const auto& record : Records(harness)) EXPECT_EQ(record->bubble, 0);
}

}  // namespace
}  // namespace treadle
