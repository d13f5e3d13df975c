// A trace of requests through the real scheduler and an engine of virtual time.
//
// Policy, planner, request pool, K/V accounting, prefix cache and loop (LoopCore) are those of
// `treadle serve`; only the engine and the clock are not. So what is simulated is decided by the
// code that decides it in service. The loop itself takes no virtual time.
//
// Thread safety: Simulate is self-contained.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/load_replay.h"
#include "engine/plan/kv_paging.h"
#include "scheduler/policy.h"

namespace treadle {

struct SimulationOptions {
  std::string policy = "fcfs";
  BatchLimits limits;  // stages, depth and max_context too
  KvPaging paging;
  PageCounts pages;
  double hop = 0;
  // Seconds that a stage takes for a plan, and for so many rows that the policy pads it with.
  std::function<double(const IterationPlan& plan, int64_t padding, int stage)> seconds;
  uint64_t seed = 1;  // of the prompts' tokens
};

struct SimulationResult {
  LoadResult load;
  int64_t iterations = 0;
  int64_t rows = 0;     // that were asked for, and
  int64_t padding = 0;  // rows beside them
  double busy = 0;      // part of the time that a stage was at work, over all stages
};

// Every request runs to its traced length. InvalidArgument names a request that can never run.
absl::StatusOr<SimulationResult> Simulate(const std::vector<TraceEntry>& trace,
                                          const SimulationOptions& options);

}  // namespace treadle
