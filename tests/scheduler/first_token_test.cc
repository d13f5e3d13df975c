// Forecasts of first tokens, and their use by --max-ttft, on a clock that goes on by
// a + b * rows seconds an iteration.

#include "scheduler/first_token.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <deque>
#include <map>

#include "base/retry_after.h"
#include "kernels/op_cases/random.h"
#include "tests/scheduler/loop_harness.h"

namespace treadle {
namespace {

using testing::HasSubstr;

constexpr double kPerIteration = 0.003, kPerRow = 0.0005;

double CostOf(int64_t rows) { return kPerIteration + kPerRow * static_cast<double>(rows); }

TEST(IterationCost, IterationsThatWereInterruptedDoNotCount) {
  Random random(1);
  for (int round = 0; round < 100; ++round) {
    IterationCost cost;
    for (size_t i = 0; i < 128; ++i) {
      const int64_t rows = 1 + random.Below(64);
      const bool interrupted = random.Below(5) == 0;
      cost.Note(rows,
                CostOf(rows) * (interrupted ? 20 + static_cast<double>(random.Below(80)) : 1));
    }
    ASSERT_TRUE(cost.known());
    EXPECT_NEAR(cost.per_iteration(), kPerIteration, 0.05 * kPerIteration) << "round " << round;
    EXPECT_NEAR(cost.per_row(), kPerRow, 0.05 * kPerRow) << "round " << round;
  }
}

TEST(IterationCost, FollowsWhatIterationsCostNow) {
  IterationCost cost;
  for (int i = 0; i < 1000; ++i) cost.Note(1 + i % 9, CostOf(1 + i % 9));
  for (size_t i = 0; i < 160; ++i) {
    const auto rows = static_cast<int64_t>(1 + i % 9);
    cost.Note(rows, 3 * CostOf(rows));
  }
  EXPECT_NEAR(cost.Of(5), 3 * CostOf(5), 1e-6);
}

TEST(IterationCost, IsNeverNegativeAndNotKnownFromTheFirstOn) {
  IterationCost cost;
  for (size_t i = 0; i + 1 < IterationCost::kEnough; ++i) cost.Note(7, 0.1);
  EXPECT_FALSE(cost.known());
  cost.Note(7, 0.1);
  EXPECT_TRUE(cost.known());
  EXPECT_NEAR(cost.Of(7), 0.1, 1e-9);  // of one number of rows alone
  for (int64_t rows = 1; rows <= 64; ++rows) {
    cost.Note(rows, 0.1 / static_cast<double>(rows));
    EXPECT_GE(cost.per_row(), 0);
    EXPECT_GE(cost.per_iteration(), 0);
  }
}

// A device that runs ahead tells of hardly any time for some iterations. Then samples may seem to
// take all of it, and a prompt's iteration without one nothing.
TEST(IterationCost, IsANumberWhateverTimesThereAre) {
  Random random(1);
  const auto between = [&](int64_t low, int64_t high) {
    return static_cast<double>(low + random.Below(high - low + 1));
  };
  for (int round = 0; round < 1000; ++round) {
    IterationCost cost;
    for (int i = 0; i < 100; ++i) {
      const bool prompt = random.Below(2) == 0;
      const double rows = prompt ? between(16, 32) : between(1, 8);
      const double samples = prompt ? between(0, 2) : rows;
      const double seconds = prompt ? std::pow(10, between(-60, -35) / 10)
                                    : rows * std::pow(10, between(-60, -45) / 10);
      cost.Note({rows, rows * between(1, 150), samples}, seconds);
      ASSERT_TRUE(std::isfinite(cost.Of({1, 1, 1})) && cost.Of({1, 1, 1}) >= 0) << round;
    }
  }
}

TEST(IterationCost, RemembersAPromptWhileSingleTokensRun) {
  IterationCost cost;
  for (int i = 0; i < 4; ++i) cost.Note(64, CostOf(64));
  for (int i = 0; i < 10000; ++i) cost.Note(1, CostOf(1));
  EXPECT_NEAR(cost.Of(64), CostOf(64), 1e-3 * CostOf(64));
}

// Rows of prompts are cheaper than those that tokens are sampled after.
TEST(IterationCost, CountsTheSamples) {
  constexpr double kPerSample = 0.0004;
  IterationCost cost;
  for (int i = 0; i < 200; ++i) {
    const double rows = 1 + i % 32;
    cost.Note({rows, 0, rows}, CostOf(1 + i % 32) + kPerSample * rows);
    cost.Note({64, 0, 1}, CostOf(64) + kPerSample);
  }
  EXPECT_NEAR(cost.per_row(), kPerRow, 0.02 * kPerRow);
  EXPECT_NEAR(cost.per_sample(), kPerSample, 0.02 * kPerSample);
}

TEST(IterationCost, CountsThePositionsThatAreRead) {
  constexpr double kPerPosition = 2e-6;
  IterationCost cost;
  Random random(3);
  for (int i = 0; i < 500; ++i) {
    const int64_t rows = 1 + random.Below(32);
    const auto positions = static_cast<double>(rows * random.Below(2000));
    cost.Note({static_cast<double>(rows), positions}, CostOf(rows) + kPerPosition * positions);
  }
  EXPECT_NEAR(cost.per_row(), kPerRow, 0.01 * kPerRow);
  EXPECT_NEAR(cost.per_position(), kPerPosition, 0.01 * kPerPosition);
  // Where all are alike, a position costs its share of an iteration of one row.
  IterationCost alike(0.001);
  for (int i = 0; i < 50; ++i) alike.Note({1, 1}, 0.010);
  EXPECT_NEAR(alike.per_position(), 1e-5, 1e-7);
  EXPECT_NEAR(alike.Of({1, 1}), 0.010, 1e-6);
}

// A loop whose iterations cost what they cost above.
class Timed {
 public:
  Timed(const std::string& policy, std::chrono::milliseconds max_ttft, int64_t pages = 400)
      : harness(Options(policy, max_ttft, pages)) {}

  // A turn, and the end of the oldest plan, if there is one.
  void Go() {
    Turn();
    if (rows_.empty()) return;
    const double seconds = rows_.front() == 0 ? 0 : CostOf(rows_.front());
    rows_.pop_front();
    const IterationTimings timings{.compute = seconds};
    harness.clock.Advance(std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9)));
    harness.engine.Complete(&timings);
    Turn();
  }
  void Turn() {
    harness.Turn();
    for (const IterationPlan& plan : harness.engine.TakePlans()) {
      int64_t& rows = rows_.emplace_back(0);
      for (const Step& step : plan.steps) rows += step.num_tokens;
    }
  }
  void Learn() {
    for (int i = 0; i < 5; ++i) Submit(10 + 9 * i, 12);
    End();
  }
  void End() {
    while (harness.pool.Load().waiting + harness.pool.Load().running > 0) Go();
  }
  Client& Submit(int32_t prompt, int32_t max_new, int32_t priority = 0,
                 Clock::duration deadline = std::chrono::hours(1)) {
    RequestSpec spec = LoopHarness::Spec(prompt, max_new, harness.clients.size());
    spec.priority = priority;
    spec.deadline = harness.clock.Now() + deadline;
    return harness.Submit(std::move(spec));
  }
  // Less than 0: nothing was foretold.
  double Foretold(const Client& client) { return harness.EndOf(client.id).predicted_first_token; }

  LoopHarness harness;

 private:
  static HarnessOptions Options(const std::string& policy, std::chrono::milliseconds max_ttft,
                                int64_t pages) {
    HarnessOptions options;
    options.policy = policy;
    options.max_ttft = max_ttft;
    options.prefix_cache = false;
    options.engine.record = true;
    options.engine.manual = true;
    options.engine.depth = 1;
    options.engine.page_size = 4;
    options.engine.total_pages = pages;
    options.limits = {.max_batch_size = 4, .max_batch_tokens = 16};
    options.engine.max_batch_tokens = 16;
    return options;
  }

  std::deque<int64_t> rows_;  // of plans in flight
};

// Nobody ends before max_new_tokens, and nobody is overtaken, so the future is known but for the
// moment within an iteration.
TEST(FirstTokens, ComeWhenTheyAreForetold) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    Timed timed("fcfs", std::chrono::hours(1), 30 + random.Below(100));
    timed.Learn();
    const size_t first = timed.harness.clients.size();
    for (int i = 0; i < 40; ++i) {
      timed.Submit(static_cast<int32_t>(1 + random.Below(60)),
                   static_cast<int32_t>(1 + random.Below(20)));
      for (int64_t steps = random.Below(12); steps > 0; --steps) timed.Go();
    }
    timed.End();
    for (size_t i = first; i < timed.harness.clients.size(); ++i) {
      const Client& client = *timed.harness.clients[i];
      ASSERT_EQ(client.status, absl::OkStatus());
      EXPECT_NEAR(timed.Foretold(client), client.timings.first_token,
                  2 * CostOf(16) + 0.05 * client.timings.first_token)
          << "seed " << seed << ", request " << i;
    }
  }
}

TEST(FirstTokens, ThatWouldComeTooLateAreRefusedAtOnce) {
  using std::chrono::milliseconds;
  Timed timed("fcfs", milliseconds(100));
  timed.Learn();
  // 100 ms are nine iterations of 16 rows, or 144 rows of a prompt.
  const Client& fits = timed.Submit(120, 4);
  timed.Turn();
  EXPECT_FALSE(fits.ended);
  Client& late = timed.Submit(60, 4);
  timed.Turn();
  ASSERT_TRUE(late.ended);
  EXPECT_EQ(late.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(late.status.message()),
              HasSubstr("expected less than the 0.1 s of --max-ttft"));
  timed.End();
  EXPECT_EQ(fits.status, absl::OkStatus());
  EXPECT_LE(fits.timings.first_token, 0.1);
  EXPECT_EQ(timed.harness.EndOf(late.id).reason, "refused");

  const Client& urgent = timed.Submit(100, 4, 0, milliseconds(50));
  timed.Turn();
  EXPECT_EQ(urgent.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(urgent.status.message()), HasSubstr("of its deadline"));
  const Client& small = timed.Submit(20, 4, 0, milliseconds(50));
  timed.End();
  EXPECT_EQ(small.status, absl::OkStatus());
}

// Whoever comes again when it was told to is accepted, if nobody else has come, and not much
// before.
TEST(FirstTokens, ARefusalSaysWhenToTryAgain) {
  Timed timed("fcfs", std::chrono::seconds(2), 20'000);
  timed.Learn();
  for (int i = 0; i < 4; ++i) timed.Submit(4, 1200);  // a whole batch, for 1,200 x 5 ms
  timed.Turn();
  const auto ask = [&]() -> Client& {
    Client& client = timed.Submit(100, 4);
    timed.Turn();
    return client;
  };
  const Client& late = ask();
  ASSERT_EQ(late.status.code(), absl::StatusCode::kResourceExhausted);
  const int64_t seconds = RetryAfterSeconds(late.status);
  EXPECT_EQ(seconds, 5);  // 6 s and a little of a batch, less 2 s, rounded up
  const auto asked = timed.harness.clock.Now();
  while (timed.harness.clock.Now() < asked + std::chrono::seconds(seconds - 2)) timed.Go();
  EXPECT_EQ(ask().status.code(), absl::StatusCode::kResourceExhausted);
  while (timed.harness.clock.Now() < asked + std::chrono::seconds(seconds)) timed.Go();
  EXPECT_FALSE(ask().ended);
  timed.End();
}

// Single tokens have run for long, and before them one prompt: what a prompt costs is known.
TEST(FirstTokens, OfAPromptAreForetoldAfterManySingleTokens) {
  Timed timed("fcfs", std::chrono::hours(1));
  timed.Submit(40, 1200);
  timed.End();
  const Client& prompt = timed.Submit(1000, 4);
  timed.End();
  EXPECT_NEAR(timed.Foretold(prompt), prompt.timings.first_token,
              0.05 * prompt.timings.first_token);
}

TEST(FirstTokens, AreForetoldInThePolicysOrder) {
  Timed timed("priority", std::chrono::milliseconds(100));
  timed.Learn();
  for (int i = 0; i < 4; ++i) timed.Submit(10, 4);
  timed.Turn();
  timed.Submit(60, 4, 1);
  const Client& late = timed.Submit(60, 4, 1);
  const Client& early = timed.Submit(60, 4);
  timed.Turn();
  EXPECT_EQ(late.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(early.ended);
  timed.End();
  EXPECT_EQ(early.status, absl::OkStatus());
}

TEST(FirstTokens, AreNotForetoldUnlessAskedFor) {
  Timed timed("fcfs", std::chrono::milliseconds(0));
  timed.Learn();
  const Client& late = timed.Submit(400, 4, 0, std::chrono::minutes(1));
  timed.End();
  EXPECT_EQ(late.status, absl::OkStatus());
  EXPECT_LT(timed.Foretold(late), 0);
}

}  // namespace
}  // namespace treadle
