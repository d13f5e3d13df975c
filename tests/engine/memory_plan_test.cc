#include "engine/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace treadle {
namespace {

using ::testing::HasSubstr;

// The default model: 2 x 30 layers x 3 heads x 64 elements x 2 bytes = 23,040 bytes per token.
ModelConfig SmolLm2() {
  ModelConfig config;
  config.layers = 30;
  config.kv_heads = 3;
  config.head_dim = 64;
  return config;
}

KvMemoryRequest Request(std::optional<int64_t> bytes, int64_t available) {
  return {.kv_bytes = bytes,
          .available_bytes = available,
          .max_batch_size = 16,
          .max_context = 1000,
          .page_size = 32,
          .kv_dtype = DType::kF16};
}

TEST(KvMemoryPlan, GivenBytesAreUsedWholePageByWholePage) {
  const auto plan = PlanKvMemory(SmolLm2(), Request(100 << 20, 0));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->bytes_per_token, 23040);
  EXPECT_EQ(plan->bytes_per_page, 23040 * 32);
  EXPECT_EQ(plan->pages_per_request, 32);
  EXPECT_EQ(plan->pages, (100 << 20) / (23040 * 32));  // 142
  EXPECT_EQ(plan->bytes, plan->pages * plan->bytes_per_page);
  EXPECT_EQ(plan->tokens, 142 * 32);
  EXPECT_EQ(plan->ToString(), "K/V cache: 142 pages, 4544 tokens x 23040 bytes = 100 MiB");
}

TEST(KvMemoryPlan, AutoTakesWhatABatchCanUse) {
  const auto plan = PlanKvMemory(SmolLm2(), Request(std::nullopt, int64_t{64} << 30));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->pages, 16 * 32);
}

TEST(KvMemoryPlan, AutoTakesAtMostHalfOfTheMemory) {
  const auto plan = PlanKvMemory(SmolLm2(), Request(std::nullopt, 200 << 20));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->pages, (100 << 20) / (23040 * 32));
}

TEST(KvMemoryPlan, FloatCachesCostTwice) {
  KvMemoryRequest request = Request(100 << 20, 0);
  request.kv_dtype = DType::kF32;
  EXPECT_EQ(PlanKvMemory(SmolLm2(), request)->bytes_per_token, 2 * 23040);
}

TEST(KvMemoryPlan, RanksBeyondTheHeadsHoldThemTwice) {
  KvMemoryRequest request = Request(100 << 20, 0);
  request.tensor_parallel = 3;  // one head each
  EXPECT_EQ(PlanKvMemory(SmolLm2(), request)->bytes_per_token, 23040);
  request.tensor_parallel = 9;  // three hold the same one
  EXPECT_EQ(PlanKvMemory(SmolLm2(), request)->bytes_per_token, 3 * 23040);
  request.tensor_parallel = 0;
  EXPECT_THAT(std::string(PlanKvMemory(SmolLm2(), request).status().message()),
              HasSubstr("tensor-parallel degree is 0"));
}

TEST(KvMemoryPlan, TooLittleShowsTheArithmetic) {
  const auto given = PlanKvMemory(SmolLm2(), Request(32 * 23040 * 32 - 1, 0));
  ASSERT_EQ(given.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(given.status().message()),
              HasSubstr("one request of 1000 tokens needs 32 pages of 32 tokens x 23040 bytes = "
                        "23592960 bytes (2 x 30 layers x 3 heads x 64 elements of f16 per token), "
                        "but --kv-memory is 23592959 bytes"));
  EXPECT_TRUE(PlanKvMemory(SmolLm2(), Request(32 * 23040 * 32, 0)).ok());
  const auto automatic = PlanKvMemory(SmolLm2(), Request(std::nullopt, 1 << 20));
  EXPECT_THAT(std::string(automatic.status().message()),
              HasSubstr("50 % of the available memory are 524288 bytes"));
}

TEST(KvMemoryPlan, NumbersOutOfRangeAreNamed) {
  KvMemoryRequest request = Request(1 << 20, 0);
  request.max_context = 0;
  const auto plan = PlanKvMemory(SmolLm2(), request);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("max context is 0"));
  EXPECT_EQ(PlanKvMemory(SmolLm2(), Request(-1, 0)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace treadle
