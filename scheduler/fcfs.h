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
  // In arrival order, ready before waiting, up to the cap; whoever does not fit stops it, so nobody
  // is overtaken. The first member is taken even if it alone exceeds its plan's share (a request of
  // n candidates is never split).
  Selection Select(const PolicyView& view) override;

  // Sequences that a plan may have: min(max_batch_size, ceil((running + waiting that fit) /
  // stages)). A literal Algorithm 1 would fill the first plan and leave the other stages idle.
  static int64_t BatchCap(const PolicyView& view);
};

}  // namespace treadle
