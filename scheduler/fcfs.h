// First come, first served, one iteration at a time: ORCA's Algorithm 1 (section 4.2), with the two
// named deviations of docs/design.md, Algorithm 1 (prompts in chunks; a fair share of the requests
// per plan when there are several stages). It remembers nothing.
#pragma once

#include <algorithm>

#include "scheduler/policy.h"

namespace treadle {

class Fcfs final : public Policy {
 public:
  std::string_view name() const override { return "fcfs"; }
  Delivery delivery() const override { return Delivery::kAsGenerated; }
  // In arrival order, ready before waiting, up to the cap; whoever does not fit stops it, so nobody
  // is overtaken. The first member is taken even if it alone exceeds its plan's share (a request of
  // n candidates is never split).
  Selection Select(const PolicyView& view) override {
    const int64_t cap = BatchCap(view);
    Selection selection;
    int64_t sequences = 0;
    KvCapacity left = view.kv;
    // Admission is in arrival order, so whoever runs arrived before whoever waits: one pass does.
    for (const auto& request : view.pool) {
      const bool waiting = request->state == RequestState::kWaiting;
      if (!waiting && !IsReady(*request, view.limits)) continue;
      const int64_t size = BatchSequences(*request);
      if (sequences > 0 && sequences + size > cap) break;
      if (waiting && !Admits(view, left, *request)) break;
      sequences += size;
      selection.push_back({request.get(), 0});
    }
    AssignTokens(view, selection);
    return selection;
  }

  // Sequences that a plan may have: min(max_batch_size, ceil((running + waiting that fit) /
  // stages)). A literal Algorithm 1 would fill the first plan and leave the other stages idle.
  static int64_t BatchCap(const PolicyView& view) {
    const BatchLimits& limits = view.limits;
    if (limits.stages == 1) return limits.max_batch_size;
    int64_t sequences = 0;
    KvCapacity left = view.kv;
    for (const auto& request : view.pool) {
      if (request->state == RequestState::kFinished) continue;
      if (request->state == RequestState::kWaiting && !Admits(view, left, *request)) break;
      sequences += BatchSequences(*request);
    }
    return std::min(limits.max_batch_size, (sequences + limits.stages - 1) / limits.stages);
  }
};

}  // namespace treadle
