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
    harness.CompleteAndTurn();
    EXPECT_EQ(harness.pool.Load().running, cached ? 2 : 1);
    harness.RunToIdle();
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
      EXPECT_EQ(client.stream->cached_tokens(), 0);
      return std::pair(turns, TakeInputs(harness));
    };
    EXPECT_EQ(cost(true), cost(false)) << "seed " << seed;
  }
}

TEST(PrefixReuse, NothingIsHadWhereEachRowIsAskedAbout) {
  HarnessOptions options = TwoTenants();
  options.as_reference = false;  // embeddings have no tokens
  LoopHarness harness(options);
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

// A model with rings, in the pages that `rings` of its longest requests and some more take.
HarnessOptions WithRings(bool states, bool whole, int64_t rings, int64_t more) {
  HarnessOptions options = TwoTenants();
  options.limits = {.max_batch_size = 4, .max_batch_tokens = 24};
  options.engine.max_batch_tokens = 24;
  options.engine.states = states;
  options.engine.window = states ? options.engine.page_size + 1 : 10;
  options.engine.total_pages = {whole ? 400 : 0, 1};
  const int64_t ring = options.engine.paging().ring;
  options.engine.total_pages[PageKind::kWindow] = ring * rings + more;
  return options;
}

// A ring has been overwritten where prompts part. The second one computes all, and keeps what the
// others need to begin there.
TEST(PrefixReuse, OthersBeginWhereTwoHaveParted) {
  for (const bool states : {true, false}) {
    for (const bool whole : {true, false}) {
      SCOPED_TRACE(Str("states ", states, ", whole ", whole));
      LoopHarness harness(WithRings(states, whole, 20, 0));
      Random random(5);
      const std::vector<int32_t> shared = Draw(random, 82);
      for (int32_t i = 0; i < 8; ++i) {
        std::vector<int32_t> prompt = shared;
        prompt.push_back(i);
        const std::vector<int32_t> own = Draw(random, 60);
        prompt.insert(prompt.end(), own.begin(), own.end());
        const Client& client = harness.Submit(Ask(prompt, static_cast<uint64_t>(2 * i), 3));
        harness.RunToIdle();
        const int32_t cached = i < 2 ? 0 : 80;
        EXPECT_EQ(client.stream->cached_tokens(), cached) << "request " << i;
        EXPECT_EQ(harness.EndOf(client.id).cached_tokens, cached);
        EXPECT_EQ(TakeInputs(harness), 143 - cached + 2) << "request " << i;
      }
    }
  }
}

// The first one knows of the others that wait, which begin when it has made copies.
TEST(PrefixReuse, ABurstRunsWhatItSharesOnceWhereThereAreRings) {
  for (const bool states : {true, false}) {
    for (const std::string policy : {"fcfs", "priority", "fair-share"}) {
      SCOPED_TRACE(Str("states ", states, ", ", policy));
      HarnessOptions options = WithRings(states, true, 20, 0);
      options.limits.max_batch_size = 8;
      options.policy = policy;
      LoopHarness harness(options);
      Random random(7);
      const std::vector<int32_t> shared = Draw(random, 82);
      for (int32_t i = 0; i < 8; ++i) {
        std::vector<int32_t> prompt = shared;
        prompt.push_back(i);
        const std::vector<int32_t> own = Draw(random, 20 + random.Below(40));
        prompt.insert(prompt.end(), own.begin(), own.end());
        harness.Submit(Ask(prompt, static_cast<uint64_t>(2 * i), 2));
      }
      harness.RunToIdle();
      int32_t first = 0;
      for (const auto& client : harness.clients) first += client->stream->cached_tokens() == 0;
      EXPECT_EQ(first, 1);
    }
  }
}

// Copies are taken of what is free, and given to whoever needs pages: requests are admitted as
// without them, and have their answers.
TEST(PrefixReuse, CopiesTakeNoRoomFromRequests) {
  for (const bool states : {true, false}) {
    for (int64_t more = 0; more < 6; ++more) {
      std::vector<int64_t> most_admitted, hits;
      for (const bool cached : {false, true}) {
        HarnessOptions options = WithRings(states, true, 2, more);
        options.prefix_cache = cached;
        LoopHarness harness(options);
        Random random(6);
        const std::vector<int32_t> shared[] = {Draw(random, 50), Draw(random, 70)};
        most_admitted.push_back(0);
        hits.push_back(0);
        for (int round = 0; round < 12; ++round) {
          for (int i = 0; i < 3; ++i) {
            std::vector<int32_t> prompt = shared[random.Below(2)];
            const std::vector<int32_t> own = Draw(random, 30 + random.Below(40));
            prompt.insert(prompt.end(), own.begin(), own.end());
            harness.Submit(Ask(prompt, 2 * harness.clients.size(), 4));
          }
          harness.Turn();
          const PoolLoad load = harness.pool.Load();
          most_admitted.back() = std::max(most_admitted.back(), load.running + load.reserved);
          harness.RunToIdle();
        }
        for (const auto& client : harness.clients) {
          EXPECT_TRUE(client->ended);
          hits.back() += client->stream->cached_tokens() > 0;
        }
      }
      EXPECT_EQ(most_admitted[0], most_admitted[1]);
      EXPECT_EQ(hits[0], 0);
      if (more > 3) EXPECT_GT(hits[1], 10);
    }
  }
}

}  // namespace
}  // namespace treadle
