// Every stage's and rank's work during some iterations, as a picture: the engine's trace events in
// the JSON format that chrome://tracing and Perfetto open.
//
// Thread safety: one thread, which drives the engine meanwhile.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/plan/defaults.h"
#include "engine/plan/kv_paging.h"

namespace treadle {

struct TimelineOptions {
  int32_t requests = 4;
  int32_t prompt_tokens = 64;
  int32_t new_tokens = 16;
  int64_t max_batch_size = kDefaultBatchSize;
  int64_t max_batch_tokens = kDefaultBatchTokens;
  KvPaging paging;
  PageCounts total_pages;
  int32_t vocab = 0;
};

// Runs the requests once to warm up and once more with tracing on, through the scheduler as a
// server would. Starts `engine`, which nobody else must use. Events come ordered by stage, rank and
// begin. Requires positive options. Errors: too few pages, the engine's.
absl::StatusOr<std::vector<TraceEvent>> RecordTimeline(Engine& engine,
                                                       const TimelineOptions& options);

// One process per stage, one thread per rank; times in microseconds from the first event. A plan
// waits while its rank is busy with others, so its waiting is an asynchronous event ("b", "e");
// everything else is a complete event ("X"), of which a rank has one at a time.
std::string ToChromeTrace(const std::vector<TraceEvent>& events);

// Per rank: its iterations, milliseconds by kind, and the share of its time that it computed.
std::string ToTable(const std::vector<TraceEvent>& events);

}  // namespace treadle
