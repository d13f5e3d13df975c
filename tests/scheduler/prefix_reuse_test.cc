// Which inputs of prompts are run, and which are had from requests before.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "kernels/op_cases/random.h"
#include "tests/scheduler/prefix_requests.h"

namespace treadle {
namespace {

using testing::IsEmpty;

TEST(PrefixReuse, ASecondTurnRunsWhatIsNew) {
  LoopHarness harness(TwoTenants());
  Random random(1);
  std::vector<int32_t> words = Draw(random, 30);
  const Client& first = harness.Submit(Ask(words, 2, 10));
  harness.RunToIdle();
  EXPECT_EQ(TakeInputs(harness), 39);
  words.insert(words.end(), first.tokens[0].begin(), first.tokens[0].end());
  const std::vector<int32_t> more = Draw(random, 5);
  words.insert(words.end(), more.begin(), more.end());
  const Client& second = harness.Submit(Ask(words, 4, 1));
  harness.RunToIdle();
  // 39 rows of the first turn, in pages of 4: 36 are whole.
  EXPECT_EQ(second.stream->cached_tokens(), 36);
  EXPECT_EQ(TakeInputs(harness), 45 - 36);
  EXPECT_EQ(harness.EndOf(second.id).cached_tokens, 36);
  EXPECT_THAT(harness.Mistakes(), IsEmpty());
}

// Requests that come together leave to the first one what it computes for all.
TEST(PrefixReuse, ABurstRunsWhatItSharesOnce) {
  HarnessOptions options = TwoTenants();
  options.limits = {.max_batch_size = 16, .max_batch_tokens = 24};
  options.engine.total_pages = 200;
  LoopHarness harness(options);
  Random random(2);
  const std::vector<int32_t> shared = Draw(random, 48);
  for (uint64_t i = 0; i < 16; ++i) {
    std::vector<int32_t> prompt = shared;
    prompt.push_back(static_cast<int32_t>(i));
    harness.Submit(Ask(prompt, 2 * i, 1));
  }
  harness.RunToIdle();
  EXPECT_EQ(TakeInputs(harness), 48 + 16);
  EXPECT_THAT(harness.Mistakes(), IsEmpty());
}

TEST(PrefixReuse, AdmissionCountsWhatIsNotShared) {
  HarnessOptions options = TwoTenants();
  options.engine.manual = true;
  options.engine.total_pages = 12;
  options.limits = {.max_batch_size = 8, .max_batch_tokens = 64};
  for (const bool cached : {true, false}) {
    options.prefix_cache = cached;
    LoopHarness harness(options);
    Random random(3);
    std::vector<int32_t> prompt = Draw(random, 32);
    harness.Submit(
        Ask(prompt, 0, 4));  // 9 pages, of which 7 are whole before the prompt's last row
    harness.Turn();
    prompt.push_back(1);
    harness.Submit(Ask(prompt, 2, 3));  // 9 more, or 2
    harness.Submit(Ask(prompt, 4, 3));
    harness.engine.Complete();
    harness.Turn();
    EXPECT_EQ(harness.pool.Load().running, cached ? 2 : 1);
    harness.RunToIdle();
    EXPECT_THAT(harness.Mistakes(), IsEmpty());
  }
}

// How long a key waits for its first token says nothing about what other keys have asked: CVE-2025-
// 46570 in a server where all share.
TEST(PrefixReuse, WhatOthersAskedMakesNoDifference) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const std::vector<int32_t> secret = Draw(random, 10 + random.Below(60));
    std::vector<int32_t> guess = secret;
    guess.resize(static_cast<size_t>(1 + random.Below(std::ssize(secret))));
    const auto cost = [&](bool others_ask) {
      LoopHarness harness(TwoTenants());
      if (others_ask) {
        harness.Submit(Ask(secret, 1));
        harness.RunToIdle();
      }
      TakeInputs(harness);
      const Client& client = harness.Submit(Ask(guess, 2, 1));
      int turns = 0;
      for (; !client.ended; ++turns) harness.Turn();
      EXPECT_THAT(harness.Mistakes(), IsEmpty());
      EXPECT_EQ(client.stream->cached_tokens(), 0);
      return std::pair(turns, TakeInputs(harness));
    };
    EXPECT_EQ(cost(true), cost(false)) << "seed " << seed;
  }
}

TEST(PrefixReuse, NothingIsHadWhereEachRowIsAskedAbout) {
  LoopHarness harness(TwoTenants());
  Random random(4);
  const std::vector<int32_t> words = Draw(random, 30);
  RequestSpec scored = Ask(words, 0, 1), mean = Ask(words, 0, 1), last = Ask(words, 0, 1);
  scored.prompt_logprobs = 0;
  mean.pooling = Pooling::kMean;
  last.pooling = Pooling::kLast;
  harness.Submit(Ask(words, 0, 1));
  harness.RunToIdle();
  for (const auto& [spec, cached] :
       {std::pair(scored, 0), std::pair(mean, 0), std::pair(last, 28)}) {
    const Client& client = harness.Submit(spec);
    harness.RunToIdle();
    EXPECT_EQ(client.stream->cached_tokens(), cached);
  }
  EXPECT_THAT(harness.engine.violations(), IsEmpty());
}

}  // namespace
}  // namespace treadle
