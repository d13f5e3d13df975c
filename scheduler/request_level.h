// The baseline that iteration-level scheduling is measured against (ORCA section 6.2): a batch is
// admitted as a whole, only when nothing runs, and its answers are delivered when all of it has
// ended. No padding; finished rows leave the computation. It remembers nothing.
#pragma once

#include "scheduler/policy.h"

namespace treadle {

class RequestLevel final : public Policy {
 public:
  std::string_view name() const override { return "request-level"; }
  Delivery delivery() const override { return Delivery::kWhenIdle; }
  Selection Select(const PolicyView& view) override;
};

}  // namespace treadle
