#include "engine/record/live_inputs.h"

#include <algorithm>
#include <utility>

namespace treadle {
namespace {

// -1: there is none.
int32_t LastSample(const Step& step, const StepResult* result) {
  if (step.outputs.empty() || step.outputs.back().row != step.num_tokens - 1) return -1;
  if (result == nullptr || result->outputs.size() != step.outputs.size()) return -1;
  return result->outputs.back().token;
}

}  // namespace

void LiveInputs::Start(const SequenceStart& start) {
  Live live;
  live.start = start;
  live.start.first_position = 0;
  live.inputs = std::exchange(live.start.earlier_tokens, {});
  live_[start.sequence] = std::move(live);
}

void LiveInputs::Apply(const IterationPlan& plan, const IterationResult& result) {
  for (const SequenceId sequence : plan.releases) live_.erase(sequence);
  for (const SequenceStart& start : plan.starts) Start(start);
  const IterationPlan told = WithTokens(plan);
  for (size_t i = 0; i < told.steps.size(); ++i) {
    const Step& step = told.steps[i];
    const auto found = live_.find(step.sequence);
    if (found == live_.end() || step.first_position < 0 ||
        static_cast<size_t>(step.first_position) > found->second.inputs.size()) {
      continue;
    }
    Live& live = found->second;
    live.inputs.resize(static_cast<size_t>(step.first_position));
    live.inputs.insert(live.inputs.end(), step.tokens.begin(), step.tokens.end());
    live.sample = LastSample(step, i < result.steps.size() ? &result.steps[i] : nullptr);
  }
}

IterationPlan LiveInputs::WithTokens(IterationPlan plan) const {
  for (Step& step : plan.steps) {
    const auto found = live_.find(step.sequence);
    if (step.tokens.empty() && found != live_.end() && found->second.sample >= 0) {
      step.tokens = {found->second.sample};
    }
  }
  return plan;
}

IterationPlan LiveInputs::Everything() const {
  IterationPlan plan;
  for (const auto& [sequence, live] : live_) {
    plan.starts.push_back(live.start);
    plan.steps.push_back({.sequence = sequence,
                          .num_tokens = static_cast<int32_t>(live.inputs.size()),
                          .tokens = live.inputs});
    Step& step = plan.steps.back();
    if (live.sample >= 0) step.outputs = {{.row = step.num_tokens - 1, .target = live.sample}};
  }
  return plan;
}

void LiveInputs::Restore(const IterationPlan& everything) {
  Clear();
  for (const SequenceStart& start : everything.starts) Start(start);
  for (const Step& step : everything.steps) {
    const auto found = live_.find(step.sequence);
    if (found == live_.end()) continue;
    found->second.inputs = step.tokens;
    found->second.sample = step.outputs.empty() ? -1 : step.outputs[0].target;
  }
}

std::vector<IterationPlan> LiveInputs::Chunks(const IterationPlan& everything, int64_t most) {
  std::vector<IterationPlan> plans(1);
  plans[0].starts = everything.starts;
  for (const Step& step : everything.steps) {
    for (size_t begin = 0; begin < step.tokens.size();) {
      // A plan has one step of a sequence.
      const size_t end = std::min(step.tokens.size(), begin + static_cast<size_t>(most));
      IterationPlan& plan = plans.emplace_back();
      Step& chunk = plan.steps.emplace_back(step);
      chunk.first_position = static_cast<int32_t>(begin);
      chunk.num_tokens = static_cast<int32_t>(end - begin);
      chunk.tokens.assign(step.tokens.begin() + begin, step.tokens.begin() + end);
      chunk.outputs.clear();
      begin = end;
    }
  }
  return plans;
}

}  // namespace treadle
