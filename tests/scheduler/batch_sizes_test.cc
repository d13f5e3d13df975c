// Batch sizes that are chosen at start: what is chosen for which cost, and what is measured. Costs
// are injected, so nothing here depends on a clock.
#include "scheduler/batch_sizes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "scheduler/cost/calibration.h"
#include "tests/scheduler/loop_harness.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

struct Line {
  double per_iteration, per_row, per_position = 0;
  double Of(double rows, double positions) const {
    return per_iteration + rows * per_row + positions * per_position;
  }
};

IterationCost CostOf(const Line& line) {
  IterationCost cost;
  for (int round = 0; round < 8; ++round) {
    for (int64_t rows = 1; rows <= 512; rows *= 2) {
      for (const int64_t context : {1, 500}) {
        const auto positions = static_cast<double>(rows * context);
        cost.Note({static_cast<double>(rows), positions},
                  line.Of(static_cast<double>(rows), positions));
      }
    }
  }
  return cost;
}

constexpr BatchLimits kLimits{.max_batch_size = 32, .max_batch_tokens = 512};

BatchLimits Chosen(const Line& line, AutoBatch choice, BatchLimits limits = kLimits) {
  return ChooseBatch(CostOf(line), limits, choice);
}

// n sequences give n / (a + b n) tokens/s. Twice as many give less than 1.1 times as many where
// 2 (a + b n) < 1.1 (a + 2 b n), which is n > 4.5 a / b.
TEST(BatchSizes, SequencesAreAsManyAsStillRaiseTheThroughput) {
  const AutoBatch choice{.size = true, .target_itl = 10};
  EXPECT_NEAR(Chosen({0.002, 0.001}, choice).max_batch_size, 10, 1);
  EXPECT_NEAR(Chosen({0.020, 0.001}, choice).max_batch_size, 91, 1);
  // A row costs nothing beside the iteration, or all that it takes.
  EXPECT_EQ(Chosen({0.020, 0.000001}, choice).max_batch_size, 256);
  EXPECT_EQ(Chosen({0.000001, 0.001}, choice).max_batch_size, 8);
  // Positions make a row dearer: 0.001 + 512 * 2e-6 = 0.002024.
  EXPECT_NEAR(Chosen({0.020, 0.001, 2e-6}, choice).max_batch_size, 45, 1);
}

TEST(BatchSizes, SequencesFitIntoCacheTokensAndTarget) {
  AutoBatch choice{.size = true, .target_itl = 10, .most_size = 20};
  EXPECT_EQ(Chosen({0.020, 0.001}, choice).max_batch_size, 20);
  choice.most_size = 2;
  EXPECT_EQ(Chosen({0.020, 0.001}, choice).max_batch_size, 2);
  choice.most_size = 256;
  EXPECT_EQ(
      Chosen({0.020, 0.001}, choice, {.max_batch_size = 1, .max_batch_tokens = 40}).max_batch_size,
      20);
  choice.target_itl = 0.050;  // 30 sequences alone take as long
  EXPECT_NEAR(Chosen({0.020, 0.001}, choice).max_batch_size, 30, 1);
}

TEST(BatchSizes, TokensAreAsManyAsTheTargetAllows) {
  const Line line{0.004, 0.0005};
  AutoBatch choice{.tokens = true, .target_itl = 0.1001};
  const int64_t tokens =
      Chosen(line, choice, {.max_batch_size = 8, .max_batch_tokens = 512}).max_batch_tokens;
  EXPECT_EQ(tokens, 192);  // 0.004 + 192 * 0.0005 is the target; sequences 8, as given
  choice.target_itl = 0.050;
  EXPECT_NEAR(static_cast<double>(Chosen(line, choice).max_batch_tokens), 92, 16);
  choice.target_itl = 10;
  EXPECT_EQ(Chosen(line, choice).max_batch_tokens, 512);
  // However slow it is, a prompt goes on beside the sequences.
  choice.target_itl = 0.001;
  EXPECT_EQ(Chosen(line, choice).max_batch_tokens, 64);
  EXPECT_EQ(Chosen(line, choice, {.max_batch_size = 1, .max_batch_tokens = 512}).max_batch_tokens,
            64);
  EXPECT_EQ(Chosen(line, choice, {.max_batch_size = 100, .max_batch_tokens = 512}).max_batch_tokens,
            200);
}

TEST(BatchSizes, ThatAreGivenStay) {
  const BatchLimits given{.max_batch_size = 3, .max_batch_tokens = 20};
  const BatchLimits chosen = Chosen({0.004, 0.0005}, {}, given);
  EXPECT_EQ(chosen.max_batch_size, 3);
  EXPECT_EQ(chosen.max_batch_tokens, 20);
}

// A fake engine, whose iterations cost what a line says.
class Measured {
 public:
  explicit Measured(const Line& line, FakeEngineOptions options = Options())
      : engine(options), line_(line), options_(options) {
    EXPECT_EQ(engine.Start([] {}), absl::OkStatus());
  }

  absl::StatusOr<uint64_t> Run(double position_share = 0) {
    cost.emplace(position_share);
    const Calibration how{.paging = options_.paging(),
                          .pages = options_.total_pages,
                          .vocab = FakeEngine::kVocab,
                          .max_batch_tokens = options_.max_batch_tokens,
                          .max_context = 1024,
                          .wait = [this](auto) { CompletePlan(); }};
    return Calibrate(engine, how, *cost);
  }

  static FakeEngineOptions Options() {
    FakeEngineOptions options;
    options.manual = options.record = true;
    options.page_size = 16;
    options.total_pages = 400;
    options.max_batch_tokens = 512;
    return options;
  }

  FakeEngine engine;
  std::optional<IterationCost> cost;
  std::vector<int64_t> rows;  // of the plans that have run
  double spent = 0;
  int fail_at = -1;  // the plan that the engine is lost with

 private:
  void CompletePlan() {
    for (const IterationPlan& plan : engine.TakePlans()) {
      if (std::ssize(rows) == fail_at) return engine.Fail(absl::UnavailableError("lost"));
      rows.push_back(plan.num_tokens());
      const double seconds =
          rows.back() == 0 ? 0 : line_.Of(static_cast<double>(rows.back()), WorkOf(plan).positions);
      spent += seconds;
      const IterationTimings timings{.compute = seconds};
      engine.Complete(&timings);
    }
  }

  const Line line_;
  const FakeEngineOptions options_;
};

TEST(Calibration, LearnsWhatIterationsCost) {
  Measured measured({0.0005, 0.00001});
  ASSERT_OK_AND_ASSIGN(const auto plans, measured.Run());
  EXPECT_EQ(plans, measured.rows.size());
  EXPECT_NEAR(measured.cost->per_iteration(), 0.0005, 1e-6);
  EXPECT_NEAR(measured.cost->per_row(), 0.00001, 1e-8);
  EXPECT_THAT(measured.rows, testing::IsSupersetOf({1, 2, 4, 8, 16, 32, 64, 128, 256, 512}));
  EXPECT_EQ(measured.engine.live_sequences(), 0);
  EXPECT_THAT(measured.engine.violations(), IsEmpty());
}

TEST(Calibration, KeepsItsBudgetHoweverSlowTheEngineIs) {
  for (const double times : {0.1, 1.0, 3.0, 10.0, 30.0, 1000.0}) {
    Measured measured({0.002 * times, 0.001 * times});
    ASSERT_TRUE(measured.Run().ok());
    // The first iteration is not counted, and the second runs whatever it takes.
    EXPECT_LT(measured.spent, 0.003 * times + std::max(0.3, 0.003 * times) * 1.1) << times;
    EXPECT_GT(measured.cost->noted(), 0U) << times;
    // A row is taken for its share of what has run.
    EXPECT_NEAR(measured.cost->Of(1), 0.003 * times, 0.0003 * times) << times;
    EXPECT_EQ(measured.engine.live_sequences(), 0);
    EXPECT_THAT(measured.engine.violations(), IsEmpty());
  }
}

TEST(Calibration, MakesDoWithFewPagesAndShortContexts) {
  for (const int64_t pages : {1, 3, 40}) {
    FakeEngineOptions options = Measured::Options();
    options.total_pages = pages;
    options.max_batch_tokens = 33;
    Measured measured({0.0005, 0.00001}, options);
    ASSERT_TRUE(measured.Run().ok()) << pages;
    EXPECT_THAT(measured.rows, Each(testing::Le(33)));
    EXPECT_THAT(measured.engine.violations(), IsEmpty());
  }
}

TEST(Calibration, WorksWithWindowsAndStages) {
  FakeEngineOptions options = Measured::Options();
  options.window = 32;
  options.total_pages = PageCounts(400, 400);
  options.stages = options.depth = 3;
  Measured measured({0.0005, 0.00001}, options);
  ASSERT_TRUE(measured.Run().ok());
  EXPECT_THAT(measured.engine.violations(), IsEmpty());
}

TEST(Calibration, EndsWithAnEngineThatIsLost) {
  for (const int plan : {0, 3}) {
    Measured measured({0.0005, 0.00001});
    measured.fail_at = plan;
    EXPECT_THAT(std::string(measured.Run().status().message()), HasSubstr("lost"));
  }
}

HarnessOptions LoopOptions() {
  HarnessOptions options;
  options.limits = {.max_batch_size = 4, .max_batch_tokens = 600};
  options.engine.page_size = 16;
  options.engine.total_pages = 400;
  return options;
}

// An iteration takes 10 ms, whatever is in it.
absl::Status CalibrateLoop(LoopHarness& harness, double target_itl) {
  harness.engine.SetTimings({.compute = 0.010});
  return harness.loop->Calibrate({.paging = harness.options.engine.paging(),
                                  .pages = harness.options.engine.total_pages,
                                  .vocab = FakeEngine::kVocab,
                                  .max_context = 1024},
                                 {.size = true, .tokens = true, .target_itl = target_itl});
}

// The loop goes on in the epoch, with the limits that were chosen.
TEST(Calibration, TheLoopServesAfterIt) {
  LoopHarness harness(LoopOptions());
  ASSERT_EQ(CalibrateLoop(harness, 0.1), absl::OkStatus());
  // All sizes cost the same, so the largest are best.
  EXPECT_EQ(harness.loop->limits().max_batch_size, 256);
  EXPECT_EQ(harness.loop->limits().max_batch_tokens, 600);
  EXPECT_TRUE(harness.loop->cost().known());
  for (uint64_t seed = 0; seed < 40; ++seed) harness.Submit(LoopHarness::Spec(20, 10, seed));
  harness.RunToIdle();
}

// As after a start beside other work.
TEST(Calibration, LimitsGrowWhereIterationsTurnOutToCostLess) {
  LoopHarness harness(LoopOptions());
  ASSERT_EQ(CalibrateLoop(harness, 0.005), absl::OkStatus());
  EXPECT_EQ(harness.loop->limits().max_batch_size, 8);
  EXPECT_EQ(harness.loop->limits().max_batch_tokens, 64);
  harness.engine.SetTimings({.compute = 0.001});
  for (uint64_t seed = 0; seed < 60; ++seed) {
    harness.Submit(LoopHarness::Spec(20, static_cast<int32_t>(20 + seed), seed));
  }
  harness.RunToIdle();
  EXPECT_GT(harness.loop->limits().max_batch_size, 8);
}

TEST(Calibration, WithoutTimesNothingIsChosen) {
  LoopHarness harness({});
  EXPECT_THAT(std::string(harness.loop
                              ->Calibrate({.paging = harness.options.engine.paging(),
                                           .pages = harness.options.engine.total_pages,
                                           .vocab = FakeEngine::kVocab,
                                           .max_context = 64},
                                          {.size = true, .tokens = true})
                              .message()),
              HasSubstr("no iteration took any time"));
  EXPECT_EQ(harness.loop->limits().max_batch_size, 4);
  harness.Submit(LoopHarness::Spec(20, 10, 1));
  harness.RunToIdle();
}

}  // namespace
}  // namespace treadle
