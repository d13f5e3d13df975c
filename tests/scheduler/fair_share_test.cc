// What a policy is told: keys, arrivals, ends and times reach it through the loop.

#include "tests/scheduler/fair_share.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/loop_harness.h"

namespace treadle {
namespace {

using testing::ElementsAre;

// One request at a time.
HarnessOptions Options() {
  HarnessOptions options;
  options.policy = FairShare::kName;
  options.engine.record = true;
  options.limits = {.max_batch_size = 1, .max_batch_tokens = 16};
  return options;
}

void Submit(LoopHarness& harness, const std::string& key, int32_t max_new = 1) {
  RequestSpec spec = LoopHarness::Spec(8, max_new, harness.clients.size());
  spec.owner = key;
  harness.Submit(std::move(spec));
}

TEST(FairShare, AKeyThatWasServedWaitsForOneThatWasNot) {
  LoopHarness harness(Options());
  for (const char* const key : {"a", "a", "a", "b"}) Submit(harness, key);
  harness.RunToIdle();
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("A", "D", "B", "C"));
  EXPECT_THAT(harness.Mistakes(), ElementsAre());
}

TEST(FairShare, WhatWasServedLongAgoCountsForLittle) {
  LoopHarness harness(Options());
  Submit(harness, "a", 4);
  harness.RunToIdle();
  harness.clock.Advance(10 * FairShare::kHalfLife);
  Submit(harness, "b");
  harness.RunToIdle();
  harness.TakePlanNames();
  Submit(harness, "b");
  Submit(harness, "a");
  harness.RunToIdle();
  EXPECT_THAT(harness.TakePlanNames(), ElementsAre("D", "C"));
}

TEST(FairShare, IsToldOfEveryArrivalAndEnd) {
  LoopHarness harness(Options());
  const auto& policy = static_cast<const FairShare&>(*harness.policy);
  for (const char* const key : {"a", "b", "c"}) Submit(harness, key, 4);
  harness.Turn();
  EXPECT_EQ(policy.keys(), 3u);
  harness.pool.Cancel(harness.clients[2]->id, absl::CancelledError("gone"));
  harness.RunToIdle();
  harness.clock.Advance(20 * FairShare::kHalfLife);
  for (const char* const key : {"a", "b", "c"}) {
    Submit(harness, key);
    harness.pool.Cancel(harness.clients.back()->id, absl::CancelledError("gone"));
  }
  harness.RunToIdle();
  EXPECT_EQ(policy.keys(), 0u);
}

}  // namespace
}  // namespace treadle
