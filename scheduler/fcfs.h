// First come, first served, one iteration at a time: ORCA's Algorithm 1 (section 4.2), with the two
// named deviations of docs/design.md, Algorithm 1 (prompts in chunks; a fair share of the requests
// per plan when there are several stages). It remembers nothing.
#pragma once

#include "scheduler/policy.h"

namespace treadle {

class Fcfs final : public Policy {
 public:
  std::string_view name() const override { return "fcfs"; }
  Delivery delivery() const override { return Delivery::kAsGenerated; }
  // Admission is in arrival order, so whoever runs arrived before whoever waits.
  std::vector<Request*> Order(const PolicyView& view) const override { return LiveRequests(view); }
  Selection Select(const PolicyView& view) override {
    Selection selection = TakeMembers(view, Order(view));
    AssignTokens(view, selection);
    return selection;
  }

  static int64_t BatchCap(const PolicyView& view) {
    return treadle::BatchCap(view, LiveRequests(view));
  }
};

}  // namespace treadle
