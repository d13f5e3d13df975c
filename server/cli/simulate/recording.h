// treadle simulate --recording.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace treadle {

// Compares the plans that the scheduler makes of a recording's requests and times with those that
// are in it (bench/simulate/recorded_plans.h). `policy`: empty: as recorded. FailedPrecondition
// says which plan differs.
absl::StatusOr<std::string> ReplayPlans(const std::string& path, const std::string& policy);

}  // namespace treadle
