// A short stream of plans for two requests, and what engines make of it.
#pragma once

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/engine/engine_runner.h"
#include "tests/engine/plan_builder.h"
#include "tests/support/reference_runner.h"

namespace treadle {

// One that decodes from the second plan on, one whose prompt takes two plans; epoch 1. `window`:
// the model has window pages too.
inline std::vector<IterationPlan> TwoRequests(bool window = false) {
  using Pages = std::vector<int32_t>;
  std::vector<IterationPlan> plans = {
      PlanOf(1, 0)
          .Start(StartOf(1, 3, {0, 1}, window ? Pages{0, 1} : Pages()))
          .Start(StartOf(2, 20, {2, 3}, window ? Pages{2, 3} : Pages()))
          .Step(SampleOf(StepOf(1, 0, {1, 2, 3}), 3))
          .Step(StepOf(2, 0, std::vector<int32_t>(19, 9)))};
  for (int32_t i = 0; i < 10; ++i) {
    Step second = i == 0 ? StepOf(2, 19, {8}) : PreviousSample(2, 19 + i);
    plans.push_back(
        PlanOf(1, i + 1).Step(SampleOf(PreviousSample(1, 3 + i), 3)).Step(SampleOf(second, 3)));
  }
  return plans;
}

// With as many plans in flight as the engine takes.
inline std::vector<IterationResult> RunPlans(EngineRunner& runner,
                                             std::vector<IterationPlan> plans) {
  std::vector<IterationResult> results;
  const size_t count = plans.size();
  for (IterationPlan& plan : plans) {
    while (!runner.engine().HasRoom()) results.push_back(runner.Next());
    runner.engine().Submit(std::move(plan));
  }
  while (results.size() < count) results.push_back(runner.Next());
  return results;
}

inline std::vector<TokenDetail> DetailsOf(const StepResult& step) {
  std::vector<TokenDetail> details;
  for (const RowResult& row : step.outputs) details.push_back(row.detail);
  return details;
}

inline void ExpectSameResults(const std::vector<IterationResult>& one,
                              const std::vector<IterationResult>& two) {
  ASSERT_EQ(one.size(), two.size());
  for (size_t i = 0; i < one.size(); ++i) {
    ASSERT_EQ(one[i].iteration, two[i].iteration);
    ASSERT_EQ(one[i].steps.size(), two[i].steps.size());
    for (size_t k = 0; k < one[i].steps.size(); ++k) {
      EXPECT_EQ(one[i].steps[k].sequence, two[i].steps[k].sequence);
      EXPECT_EQ(one[i].steps[k].token(), two[i].steps[k].token());
      EXPECT_EQ(Difference(DetailsOf(one[i].steps[k]), DetailsOf(two[i].steps[k])), "");
    }
  }
}

}  // namespace treadle
