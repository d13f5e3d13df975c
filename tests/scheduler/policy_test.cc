// The policies that remember nothing, as functions of what they see.

#include "scheduler/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "scheduler/fcfs.h"

namespace treadle {
namespace {

using testing::HasSubstr;

std::unique_ptr<Request> MakeRequest(int32_t prompt, int32_t max_new, int32_t candidates = 1) {
  auto request = std::make_unique<Request>();
  request->spec.prompt.assign(static_cast<size_t>(prompt), 1);
  request->spec.max_new_tokens = max_new;
  request->spec.candidates = candidates;
  request->sequences.resize(static_cast<size_t>(candidates));
  return request;
}

TEST(Policy, UnknownNameListsTheNames) {
  const auto policy = Policy::Create("sjf");
  EXPECT_EQ(policy.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(policy.status().message()), HasSubstr("fcfs, request-level"));
  EXPECT_EQ(Policy::Create("request-level").value()->delivery(), Policy::Delivery::kWhenIdle);
}

// s + n * (ceil((prompt + max_new) / page) - s), s = floor((prompt - 1) / page)
TEST(Policy, PagesNeeded) {
  EXPECT_EQ(PagesNeeded(MakeRequest(1, 1)->spec, {4}), 1);
  EXPECT_EQ(PagesNeeded(MakeRequest(4, 1)->spec, {4}), 2);
  EXPECT_EQ(PagesNeeded(MakeRequest(8, 8)->spec, {4}), 4);
  EXPECT_EQ(PagesNeeded(MakeRequest(8, 8, 3)->spec, {4}), 1 + 3 * 3);
  EXPECT_EQ(PagesNeeded(MakeRequest(9, 7, 3)->spec, {4}), 2 + 3 * 2);
  EXPECT_EQ(PagesNeeded(MakeRequest(1, 1, 2)->spec, {4}), 2);
}

TEST(Policy, ReadyFollowsPlansInFlightAndTokensLeft) {
  BatchLimits limits{.stages = 1, .depth = 2};
  auto request = MakeRequest(3, 2);
  EXPECT_FALSE(IsReady(*request, limits));
  request->state = RequestState::kRunning;
  EXPECT_TRUE(IsReady(*request, limits));
  request->plans_in_flight = 1;
  EXPECT_TRUE(IsReady(*request, limits));
  limits.stages = 2;
  EXPECT_FALSE(IsReady(*request, limits));
  limits.stages = 1;
  request->sequences[0].produced = 1;
  request->sequences[0].in_flight = 1;
  EXPECT_FALSE(IsReady(*request, limits)) << "its last token is in flight";
}

TEST(Policy, StageCapIsAFairShare) {
  std::vector<std::unique_ptr<Request>> pool;
  for (int i = 0; i < 7; ++i) pool.push_back(MakeRequest(3, 1));
  BatchLimits limits{.max_batch_size = 8, .max_batch_tokens = 64, .stages = 3, .depth = 3};
  KvCapacity kv{.paging = {4}, .total_pages = 100, .free_pages = 100};
  EXPECT_EQ(Fcfs::BatchCap({pool, kv, limits}), 3);  // ceil(7 / 3)
  kv.free_pages = 4;
  EXPECT_EQ(Fcfs::BatchCap({pool, kv, limits}), 2);  // only four fit now
  limits.max_batch_size = 1;
  EXPECT_EQ(Fcfs::BatchCap({pool, kv, limits}), 1);
  limits.stages = 1;
  limits.max_batch_size = 8;
  EXPECT_EQ(Fcfs::BatchCap({pool, kv, limits}), 8);
}

TEST(Policy, CandidatesAreNotSplitAndNeverStarve) {
  std::vector<std::unique_ptr<Request>> pool;
  pool.push_back(MakeRequest(3, 1, 4));
  pool.push_back(MakeRequest(3, 1));
  const KvCapacity kv{.paging = {4}, .total_pages = 100, .free_pages = 100};
  const BatchLimits limits{.max_batch_size = 4, .max_batch_tokens = 64, .stages = 3, .depth = 3};
  const Selection selection = Fcfs().Select({pool, kv, limits});  // its share alone would be 2
  ASSERT_EQ(selection.size(), 1u);
  EXPECT_EQ(selection[0].request, pool[0].get());
  EXPECT_EQ(selection[0].num_tokens, 3);
}

TEST(Policy, SpentBudgetOnlyReserves) {
  std::vector<std::unique_ptr<Request>> pool;
  pool.push_back(MakeRequest(30, 1));
  pool.push_back(MakeRequest(3, 1));
  const KvCapacity kv{.paging = {4}, .total_pages = 100, .free_pages = 100};
  const Selection selection =
      Fcfs().Select({pool, kv, {.max_batch_size = 4, .max_batch_tokens = 16}});
  ASSERT_EQ(selection.size(), 2u);
  EXPECT_EQ(selection[0].num_tokens, 16);
  EXPECT_EQ(selection[1].num_tokens, 0);
}

}  // namespace
}  // namespace treadle
