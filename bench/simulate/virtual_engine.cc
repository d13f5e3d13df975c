#include "bench/simulate/virtual_engine.h"

#include <algorithm>
#include <utility>

namespace treadle {

void VirtualEngine::Submit(IterationPlan plan) {
  Running running;
  IterationResult& result = running.result;
  result.epoch = plan.epoch;
  result.iteration = plan.iteration;
  for (const Step& step : plan.steps) {
    StepResult& answer = result.steps.emplace_back();
    answer.sequence = step.sequence;
    for (const RowOutput& asked : step.outputs) {
      answer.outputs.push_back({.token = asked.sample ? kToken : -1});
    }
  }
  if (!plan.steps.empty()) ++iterations_;
  if (options_.answer) {
    running.done = options_.answer(plan, result);
    return running_.push_back(std::move(running));
  }
  double time = clock_.seconds();
  for (int stage = 0; stage < options_.stages; ++stage) {
    const bool runs = !plan.steps.empty();
    const double seconds = runs ? options_.seconds(plan, stage) : 0;
    const double begin = std::max(time, free_at_[stage]);
    result.timings.receive = std::max(0.0, time - std::max(free_at_[stage], clock_.seconds()));
    result.timings.gap = begin - free_at_[stage];
    result.timings.compute = seconds;
    time = free_at_[stage] = begin + seconds;
    busy_ += seconds;
    if (stage + 1 < options_.stages && runs) time += options_.hop;
  }
  running.done = time;
  running_.push_back(std::move(running));
}

std::vector<IterationResult> VirtualEngine::TakeResults() {
  std::vector<IterationResult> results;
  // The clock counts whole nanoseconds.
  while (!running_.empty() && running_.front().done <= clock_.seconds() + 1e-9) {
    results.push_back(std::move(running_.front().result));
    running_.pop_front();
  }
  return results;
}

std::optional<double> VirtualEngine::NextDone() const {
  if (running_.empty()) return std::nullopt;
  return running_.front().done;
}

}  // namespace treadle
