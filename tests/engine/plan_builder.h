// Short ways to write plans in tests.
#pragma once

#include <utility>
#include <vector>

#include "engine/plan/iteration_plan.h"

namespace treadle {

inline SequenceStart StartOf(SequenceId id, int32_t prompt_length, std::vector<int32_t> pages,
                             std::vector<int32_t> window_pages = {}) {
  SequenceStart start;
  start.sequence = id;
  start.prompt_length = prompt_length;
  start.pages = SequencePages({std::move(pages), std::move(window_pages)});
  start.sampling.temperature = 0;
  return start;
}

inline Step StepOf(SequenceId id, int32_t first_position, std::vector<int32_t> tokens) {
  Step step;
  step.sequence = id;
  step.first_position = first_position;
  step.num_tokens = static_cast<int32_t>(tokens.size());
  step.tokens = std::move(tokens);
  return step;
}

inline Step SampleOf(Step step, int32_t top_logprobs = -1) {
  step.outputs.push_back(
      {.row = step.num_tokens - 1, .sample = true, .top_logprobs = top_logprobs});
  return step;
}

// With the log probability of what follows each row: the step's own tokens, then `next` (-1: none).
inline Step ScoredOf(Step step, int32_t next, int32_t top_logprobs) {
  for (int32_t row = 0; row < step.num_tokens; ++row) {
    const int32_t target = row + 1 < step.num_tokens ? step.tokens[row + 1] : next;
    if (target < 0) continue;
    step.outputs.push_back({.row = row, .target = target, .target_logprobs = top_logprobs});
  }
  return step;
}

inline Step MaskedOf(Step step) {
  step.outputs.push_back({.row = step.num_tokens - 1, .sample = true, .masked = true});
  return step;
}

inline Step HiddenOf(Step step) {
  step.outputs.push_back({.row = step.num_tokens - 1, .hidden = true});
  return step;
}

inline Step PreviousSample(SequenceId id, int32_t position) {
  Step step;
  step.sequence = id;
  step.first_position = position;
  step.num_tokens = 1;
  return step;
}

// PlanOf(epoch, iteration).Release(7).Start(...).Step(...) is an IterationPlan.
class PlanOf {
 public:
  explicit PlanOf(uint64_t epoch = 1, uint64_t iteration = 0) {
    plan_.epoch = epoch;
    plan_.iteration = iteration;
  }
  PlanOf& Release(SequenceId id) { return plan_.releases.push_back(id), *this; }
  PlanOf& Copy(int32_t from, int32_t to, PageKind kind = PageKind::kWhole) {
    return plan_.page_copies[kind].push_back({from, to}), *this;
  }
  PlanOf& Start(SequenceStart start) { return plan_.starts.push_back(std::move(start)), *this; }
  PlanOf& Step(struct Step step) { return plan_.steps.push_back(std::move(step)), *this; }
  PlanOf& Stages(StageRange stages) { return plan_.stages = stages, *this; }
  operator const IterationPlan&() const { return plan_; }  // NOLINT: reads as the plan it is

 private:
  IterationPlan plan_;
};

}  // namespace treadle
