#include "engine/record/live_inputs.h"

#include <algorithm>
#include <utility>

namespace treadle {
namespace {

// Whether two sequences have the same page at position 0.
bool ShareBeginning(const SequencePages& one, const SequencePages& other) {
  const auto same = [](const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
    return !a.empty() && !b.empty() && a[0] == b[0];
  };
  return same(one.whole, other.whole) || same(one.window, other.window);
}

}  // namespace

void LiveInputs::Start(const SequenceStart& start) {
  Live live;
  live.start = start;
  live.start.first_position = 0;
  live.inputs = std::exchange(live.start.earlier_tokens, {});
  const auto first = static_cast<size_t>(start.first_position);
  // Further candidates share or copy what the first one has run, which lives when they start.
  const auto knows = [&](const auto& entry) {
    return entry.second.inputs.size() >= first &&
           (ShareBeginning(entry.second.start.pages, start.pages) ||
            entry.first + start.candidate == start.sequence);
  };
  if (live.inputs.size() < first) {
    const auto found = std::ranges::find_if(live_, knows);
    if (found != live_.end()) {
      live.inputs.assign(found->second.inputs.begin(), found->second.inputs.begin() + first);
    }
  }
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
    live.sample = i < result.steps.size() ? result.steps[i].token : -1;
    live.pooling = step.pooling;
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
                          .tokens = live.inputs,
                          .pooling = live.pooling});
    // The sample that the next step may take without saying so.
    plan.steps.back().next_token = live.sample;
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
    found->second.sample = step.next_token;
    found->second.pooling = step.pooling;
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
      chunk.next_token = -1;
      begin = end;
    }
  }
  return plans;
}

}  // namespace treadle
