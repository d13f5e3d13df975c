// The baseline that iteration-level scheduling is measured against (ORCA section 6.2): a batch is
// admitted as a whole, only when nothing runs, and its answers are delivered when all of it has
// ended. No padding; finished rows leave the computation. Thread safety: stateless.
#pragma once

#include "scheduler/policy.h"

namespace treadle {

class RequestLevel final : public Policy {
 public:
  std::string_view name() const override { return "request-level"; }
  Delivery delivery() const override { return Delivery::kWhenIdle; }
  Selection Select(std::span<const std::unique_ptr<Request>> pool, const KvCapacity& kv,
                   const BatchLimits& limits) const override;
};

}  // namespace treadle
