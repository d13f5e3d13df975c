// The simulator against closed forms: what an engine of virtual time does is known exactly.

#include "bench/simulate/simulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "bench/simulate/virtual_engine.h"

namespace treadle {
namespace {

using testing::DoubleNear;
using testing::Each;
using testing::HasSubstr;

SimulationOptions Machine(int stages, int64_t batch) {
  SimulationOptions options;
  options.limits = {.max_batch_size = batch,
                    .max_batch_tokens = 1024,
                    .stages = stages,
                    .depth = stages,
                    .max_context = 512};
  options.paging = {.page_size = 4};
  options.pages = 4096;
  options.seconds = [](const IterationPlan&, int64_t, int) { return 1.0; };
  return options;
}

SimulationResult Simulated(const std::vector<TraceEntry>& trace, const SimulationOptions& options) {
  const absl::StatusOr<SimulationResult> result = Simulate(trace, options);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *result : SimulationResult();
}

std::vector<double> Ends(const SimulationResult& result) {
  std::vector<double> ends;
  for (const LoadRecord& request : result.load.requests) ends.push_back(request.end);
  return ends;
}

// A plan waits for each stage until the one before it has left.
TEST(VirtualEngine, StagesOverlapAndHopsAddUp) {
  VirtualClock clock;
  VirtualEngine engine(
      clock, {.stages = 3, .depth = 3, .hop = 0.5, .seconds = [](const IterationPlan&, int stage) {
                return stage == 1 ? 4.0 : 1.0;  // the second one is slow
              }});
  for (uint64_t i = 0; i < 3; ++i) {
    IterationPlan plan;
    plan.iteration = i;
    plan.steps.push_back({.num_tokens = 1});
    EXPECT_TRUE(engine.HasRoom());
    engine.Submit(std::move(plan));
  }
  EXPECT_FALSE(engine.HasRoom());
  // 1 + 0.5 + 4 + 0.5 + 1, and then one every 4 seconds.
  for (const double done : {7.0, 11.0, 15.0}) {
    EXPECT_DOUBLE_EQ(engine.NextDone().value(), done);
    clock.Set(done - 0.01);
    EXPECT_TRUE(engine.TakeResults().empty());
    clock.Set(done);
    const std::vector<IterationResult> results = engine.TakeResults();
    ASSERT_EQ(results.size(), 1u);
    EXPECT_DOUBLE_EQ(results[0].timings.compute, 1);
  }
  EXPECT_FALSE(engine.NextDone());
  EXPECT_DOUBLE_EQ(engine.busy(), 18);
}

TEST(Simulate, ARequestAloneTakesAnIterationAToken) {
  const SimulationResult result = Simulated({{2.5, 7, 5}}, Machine(1, 8));
  const LoadRecord& request = result.load.requests[0];
  EXPECT_THAT(request.token_times, testing::ElementsAre(3.5, 4.5, 5.5, 6.5, 7.5));
  EXPECT_EQ(request.error, "");
  EXPECT_EQ(result.iterations, 5);
  EXPECT_EQ(result.rows, 7 + 4);
  EXPECT_DOUBLE_EQ(result.load.duration, 5);
  EXPECT_DOUBLE_EQ(result.busy, 1);
}

// Figure 8a: three workers and a batch of two: AB, CD and EF follow each other through the stages,
// and each of them is back after three.
TEST(Simulate, APipelineIsFull) {
  const std::vector<TraceEntry> trace(6, {0, 4, 3});
  const SimulationResult result = Simulated(trace, Machine(3, 2));
  EXPECT_THAT(Ends(result), testing::ElementsAre(9, 9, 10, 10, 11, 11));
  EXPECT_NEAR(result.busy, 27.0 / (3 * 11), 1e-9) << "but for filling and draining";
}

// Figure 8b: the same stages idle between the microbatches of a batch, and the next batch waits.
TEST(Simulate, MicrobatchesLeaveBubbles) {
  SimulationOptions options = Machine(3, 2);
  options.policy = "faster-transformer";
  options.limits.microbatch_size = 1;
  const std::vector<TraceEntry> trace(4, {0, 4, 3});
  // A and B enter at 0 and 1, and again when they are back: B's third iteration ends at 10.
  EXPECT_THAT(Ends(Simulated(trace, options)), testing::ElementsAre(10, 10, 20, 20));
}

// Seconds are the product of what is computed, padding too; request-level has none.
TEST(Simulate, PaddingCosts) {
  SimulationOptions options = Machine(1, 2);
  options.seconds = [](const IterationPlan& plan, int64_t padding, int) {
    return static_cast<double>(plan.num_tokens() + padding);
  };
  const std::vector<TraceEntry> trace = {{0, 2, 1}, {0, 4, 3}};
  options.policy = "faster-transformer";  // 2+2, 1+1, then B alone, beside A's row
  SimulationResult result = Simulated(trace, options);
  EXPECT_EQ(result.padding, 4);
  EXPECT_DOUBLE_EQ(result.load.duration, 4 + 2 + 2 + 2 + 2);
  options.policy = "faster-transformer-padded";  // 2+4 and two of padding, then B and A's row
  result = Simulated(trace, options);
  EXPECT_EQ(result.padding, 2 + 1 + 1);
  EXPECT_DOUBLE_EQ(result.load.duration, 8 + 2 + 2);
  options.policy = "request-level";
  result = Simulated(trace, options);
  EXPECT_EQ(result.padding, 0);
  EXPECT_DOUBLE_EQ(result.load.duration, 6 + 1 + 1);
}

// M/D/1: Poisson arrivals, one at a time, constant service: the mean wait is rho / (2 (1 - rho))
// services (Pollaczek-Khinchine).
TEST(Simulate, IsAQueueWhereItIsOne) {
  SimulationOptions options = Machine(1, 1);
  const std::vector<TraceEntry> trace = MakeTrace(
      {.num_requests = 40'000, .request_rate = 0.5, .input = {1, 1}, .output = {1, 1}, .seed = 7});
  double waited = 0;
  const SimulationResult result = Simulated(trace, options);
  for (const LoadRecord& request : result.load.requests) {
    waited += request.end - request.scheduled - 1;
  }
  EXPECT_NEAR(waited / 40'000, 0.5 / (2 * 0.5), 0.03);
}

TEST(Simulate, EqualRunsAreEqual) {
  const std::vector<TraceEntry> trace = MakeTrace({.num_requests = 200, .request_rate = 1});
  SimulationOptions options = Machine(2, 8);
  options.limits.max_context = 0;
  EXPECT_EQ(Ends(Simulated(trace, options)), Ends(Simulated(trace, options)));
}

TEST(Simulate, RefusesWhatCannotRun) {
  const auto message = [](const std::vector<TraceEntry>& trace, const SimulationOptions& options) {
    return std::string(Simulate(trace, options).status().message());
  };
  SimulationOptions options = Machine(1, 8);
  EXPECT_THAT(message({{0, 1, 1}, {0, -3, 1}}, options),
              HasSubstr("request 2 of the trace has -3 prompt tokens"));
  EXPECT_THAT(message({{2, 1, 1}, {1, 1, 1}}, options),
              HasSubstr("request 2 of the trace arrives at 1 s, before the one ahead of it (2 s)"));
  EXPECT_THAT(message({{0, 500, 13}}, options),
              HasSubstr("has 513 tokens, expected at most the context of 512"));
  options.pages = 10;
  EXPECT_THAT(message({{0, 40, 1}}, options), HasSubstr("needs 11 pages of the K/V cache, which "
                                                        "has 10"));
  options.policy = "sjf";
  EXPECT_THAT(message({}, options), HasSubstr("scheduling policy 'sjf' is unknown"));
}

}  // namespace
}  // namespace treadle
