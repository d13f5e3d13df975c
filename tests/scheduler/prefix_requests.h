// Requests of two tenants for tests of what is reused of prompts.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "kernels/op_cases/random.h"
#include "tests/scheduler/loop_harness.h"

namespace treadle {

inline HarnessOptions TwoTenants() {
  HarnessOptions options;
  options.engine.record = true;
  options.engine.tenants = 2;  // by seed, as the salts below
  return options;
}

inline RequestSpec Ask(const std::vector<int32_t>& prompt, uint64_t seed, int32_t max_new = 4) {
  RequestSpec spec = LoopHarness::Spec(1, max_new, seed);
  spec.prompt = prompt;
  spec.cache_salt = Str("tenant ", seed % 2);
  return spec;
}

inline std::vector<int32_t> Draw(Random& random, int64_t count) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(random.Below(60)));
  return ids;
}

// Inputs that plans since the last call ran.
inline int64_t TakeInputs(LoopHarness& harness) {
  int64_t inputs = 0;
  for (const IterationPlan& plan : harness.engine.TakePlans()) inputs += plan.num_tokens();
  return inputs;
}

}  // namespace treadle
