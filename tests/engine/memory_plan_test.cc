#include "engine/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "models/checkpoints/checkpoint.h"
#include "tests/support/assert_ok.h"

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
  ASSERT_OK_AND_ASSIGN(const auto plan, PlanKvMemory(SmolLm2(), Request(100 << 20, 0)));
  EXPECT_EQ(plan.bytes_per_token, 23040);
  EXPECT_EQ(plan.bytes_per_page, 23040 * 32);
  EXPECT_EQ(plan.pages_per_request, 32);
  EXPECT_EQ(plan.pages, (100 << 20) / (23040 * 32));  // 142
  EXPECT_EQ(plan.bytes, 142 * 23040 * 32);
  EXPECT_EQ(plan.ToString(),
            "K/V cache: 142 pages of 32 tokens x 23040 bytes = 104693760 bytes (100 MiB)");
}

// DeepSeek V2 Lite: 27 layers x (512 + 64) elements, once, x 2 bytes; on each of two ranks all.
TEST(KvMemoryPlan, LatentsAreStoredOnce) {
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open("random:deepseek-v2-lite"));
  KvMemoryRequest request = Request(100 << 20, 0);
  for (const int64_t ranks : {1, 2}) {
    request.tensor_parallel = ranks;
    ASSERT_OK_AND_ASSIGN(const auto plan, PlanKvMemory(checkpoint->config(), request));
    EXPECT_EQ(plan.bytes_per_token, ranks * 27 * 576 * 2);
  }
}

TEST(KvMemoryPlan, GivenBytesThatAreNotThereAreRefused) {
  const auto plan = PlanKvMemory(SmolLm2(), Request(int64_t{500} << 30, int64_t{23} << 30));
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(plan.status().message(),
            "--kv-memory is 512000M, but the memory beside the weights is 23552M; expected no more "
            "than that, or auto");
  EXPECT_TRUE(PlanKvMemory(SmolLm2(), Request(int64_t{23} << 30, int64_t{23} << 30)).ok());
}

TEST(KvMemoryPlan, AutoTakesWhatABatchCanUse) {
  ASSERT_OK_AND_ASSIGN(const auto plan,
                       PlanKvMemory(SmolLm2(), Request(std::nullopt, int64_t{64} << 30)));
  EXPECT_EQ(plan.pages, 16 * 32);
}

TEST(KvMemoryPlan, AutoTakesAtMostHalfOfTheMemory) {
  ASSERT_OK_AND_ASSIGN(const auto plan, PlanKvMemory(SmolLm2(), Request(std::nullopt, 200 << 20)));
  EXPECT_EQ(plan.pages, (100 << 20) / (23040 * 32));
}

TEST(KvMemoryPlan, FloatCachesCostTwice) {
  KvMemoryRequest request = Request(100 << 20, 0);
  request.kv_dtype = DType::kF32;
  EXPECT_EQ(PlanKvMemory(SmolLm2(), request)->bytes_per_token, 2 * 23040);
}

// 64 codes and a scale of 2 bytes instead of 128 bytes: 1.94 times as many.
TEST(KvMemoryPlan, EightBitsHoldNearlyTwiceAsMany) {
  KvMemoryRequest request = Request(int64_t{17 * 32} * 32 * 23040, 0);
  EXPECT_EQ(PlanKvMemory(SmolLm2(), request)->pages, 17 * 32);
  request.kv_dtype = DType::kI8;
  const auto plan = PlanKvMemory(SmolLm2(), request);
  EXPECT_EQ(plan->bytes_per_token, 2 * 30 * 3 * (64 + 2));
  EXPECT_EQ(plan->pages, 17 * 32 * 23040 / 11880);
  request.kv_bytes = 1;
  EXPECT_THAT(std::string(PlanKvMemory(SmolLm2(), request).status().message()),
              HasSubstr("64 elements of int8 and a scale per token)"));
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

// 2 x 32 layers x 8 heads x 128 elements x 2 bytes = 131,072 bytes per token.
TEST(KvMemoryPlan, BehindMistralsWindowNothingIsReserved) {
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open("random:mistral-7b"));
  const ModelConfig& config = checkpoint->config();
  ASSERT_EQ(config.context, 32768);
  for (const int64_t page_size : {16, 32, 64, 128}) {
    for (const int64_t chunk : {512, 2048}) {
      ASSERT_OK_AND_ASSIGN(const auto plan, PlanKvMemory(config, {.kv_bytes = int64_t{16} << 30,
                                                                  .max_batch_size = 16,
                                                                  .max_batch_tokens = chunk,
                                                                  .max_context = config.context,
                                                                  .page_size = page_size}));
      EXPECT_EQ(plan.pages_per_request[PageKind::kWhole], 0);
      EXPECT_LE(plan.pages_per_request[PageKind::kWindow] * page_size, 4096 + chunk + page_size);
      EXPECT_GE(plan.pages_per_request[PageKind::kWindow] * page_size, 4096 + chunk);
      EXPECT_EQ(plan.bytes_per_token, PageCounts(0, 131072));
      EXPECT_EQ(plan.pages, PageCounts(0, (int64_t{16} << 30) / (131072 * page_size)));
      // A request that ends within its window reserves what it can use.
      EXPECT_EQ(plan.paging.PagesFor(3 * page_size), PageCounts(0, 3));
    }
  }
}

// Each sixth of 18 layers sees everything: 2 x 256 elements x 2 bytes = 1,024 bytes per token each.
TEST(KvMemoryPlan, BothKindsShareTheMemoryByWhatARequestTakes) {
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open("random:gemma-3-270m"));
  KvMemoryRequest request{.kv_bytes = 256 << 20,
                          .max_batch_size = 16,
                          .max_batch_tokens = 512,
                          .max_context = 32768,
                          .page_size = 32};
  auto plan = PlanKvMemory(checkpoint->config(), request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->bytes_per_token, PageCounts(3 * 1024, 15 * 1024));
  EXPECT_EQ(plan->pages_per_request, PageCounts(1024, 32));
  const int64_t each = 1024 * 3 * 32768 + 32 * 15 * 32768;
  EXPECT_EQ(plan->pages, PageCounts((int64_t{1024} << 28) / each, (int64_t{32} << 28) / each));
  EXPECT_LE(plan->bytes, 256 << 20);
  EXPECT_GT(plan->bytes, (256 << 20) - 18 * 32768);
  EXPECT_THAT(plan->ToString(), HasSubstr(" window pages of 32 tokens x 15360 bytes = "));
  // The first five layers only, which are local, and with room for all in the batch.
  request.kv_bytes.reset();
  request.available_bytes = int64_t{64} << 30;
  request.layers = {0, 5};
  plan = PlanKvMemory(checkpoint->config(), request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->bytes_per_token, PageCounts(0, 5 * 1024));
  EXPECT_EQ(plan->pages, PageCounts(16 * 1024, 16 * 32));
}

// Each sixth of 42 layers sees everything, with heads of twice the size; the last 18 have no K/V.
TEST(KvMemoryPlan, LayersThatReadOthersTakeNothing) {
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open("random:gemma-4-e4b"));
  const ModelConfig& config = checkpoint->config();
  const KvMemoryPlan plan = KvMemoryOf(config, {.page_size = 32}, {2, 3});
  EXPECT_EQ(plan.bytes_per_token, PageCounts(4 * 2 * 2 * 512 * 2, 20 * 2 * 2 * 256 * 2));
  EXPECT_EQ(plan.bytes, 32 * (2 * 16384 + 3 * 40960));
  // Two ranks for each head, of both kinds.
  const KvMemoryPlan ranks = KvMemoryOf(config, {.page_size = 32, .tensor_parallel = 4}, {2, 3});
  EXPECT_EQ(ranks.bytes, 2 * plan.bytes);
  EXPECT_EQ(config.KvSource(41), 23);
  EXPECT_EQ(config.KvSource(40), 22);
  EXPECT_EQ(config.LastStageBegin(), 22);
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
