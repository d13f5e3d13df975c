// The cost of the scheduler itself: selection, planning and bookkeeping per iteration, with an
// engine that does nothing. Its own time and the clients' are not counted. And what the prefix
// cache adds to a request with a long prompt.
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

struct SchedulerBenchReport {
  struct Row {
    int32_t running = 0;
    double microseconds_per_iteration = 0;
  };
  std::vector<Row> rows;
  // A request's whole life, of which the prompt is found but for the last page, or none of it.
  static constexpr int32_t kPromptTokens = 8192;
  double microseconds_found = 0;
  double microseconds_not_found = 0;
};

// Requires positive options.
absl::StatusOr<SchedulerBenchReport> RunSchedulerBench(const SchedulerBenchOptions& options);

std::string ToJson(const SchedulerBenchReport& report);
std::string ToTable(const SchedulerBenchReport& report);

}  // namespace treadle
