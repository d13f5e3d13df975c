// Whether a result answers the plan it is for: results of workers come from other machines.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "engine/plan/iteration_plan.h"

namespace treadle {

// InvalidArgument names the step and what does not fit: another sequence; a token, an alternative
// or a hidden state that was not asked, is missing, or is outside the vocabulary.
absl::Status CheckResult(const IterationResult& result, const std::vector<Step>& steps,
                         int64_t vocab, int64_t hidden);

}  // namespace treadle
