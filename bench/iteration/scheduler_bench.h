// What the scheduler itself costs: selection, planning and bookkeeping per iteration, with an
// engine that does nothing. Its own time and the clients' are not counted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

struct SchedulerBenchOptions {
  std::vector<int32_t> running = {1, 32, 256};  // requests, all in the increment phase
  int64_t waiting = 64;                         // requests queued behind them
  int64_t iterations = 2000;                    // per repeat
  int repeats = 5;  // the fastest is reported: everything else is the machine's
};

struct SchedulerBenchRow {
  int32_t running = 0;
  double microseconds_per_iteration = 0;
};

// Requires positive options.
absl::StatusOr<std::vector<SchedulerBenchRow>> RunSchedulerBench(
    const SchedulerBenchOptions& options);

std::string ToJson(const std::vector<SchedulerBenchRow>& rows);
std::string ToTable(const std::vector<SchedulerBenchRow>& rows);

}  // namespace treadle
