// The plans of a recording (`treadle serve --record`), made again: its requests come when they
// came, its iterations are done when they were, and the real scheduler decides anew. Equal plans in
// the same order show that the simulator's scheduler is the server's.
//
// A recording says neither all of a request nor all of a policy's reasons. It must be of one epoch
// from its beginning, of the policies that look at arrival alone, without guesses of next tokens,
// constraints, stop strings, prompts' log probabilities or cache salts, and every request must have
// ended by itself.
//
// Thread safety: stateless.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "scheduler/policy.h"

namespace treadle {

// The settings that decide plans beside requests and times; stages and depth are the engine's.
struct RecordedScheduling {
  std::string policy = "fcfs";
  BatchLimits limits;
  KvPaging paging;
  PageCounts pages;
  bool prefix_cache = true;
};

struct PlanComparison {
  int64_t plans = 0;     // that are equal, from the first on
  int64_t recorded = 0;  // of all
  int64_t requests = 0;
  std::string difference;  // of the plan after these; empty: there is none
};

// InvalidArgument: the recording is damaged, or has what is said above.
absl::StatusOr<PlanComparison> ComparePlans(std::string_view recording,
                                            const RecordedScheduling& scheduling);

}  // namespace treadle
