// The timeline of a stage's ranks, while somebody wants it. Thread safety: any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/sync.h"
#include "engine/iteration_plan.h"
#include "engine/stage.h"
#include "engine/trace_events.h"

namespace treadle {

class StageTrace {
 public:
  explicit StageTrace(int stage) : stage_(stage) {}

  void Set(bool on) {
    MutexLock lock(mutex_);
    on_ = on;
  }
  // What was added since the last call; the oldest beyond kMaxTraceEvents are lost.
  std::vector<TraceEvent> Take();
  // The phases of a plan with steps that a rank has run. Nothing while it is off.
  void Add(const IterationPlan& plan, std::chrono::steady_clock::time_point arrived,
           const Stage::Times& times, int rank, bool first_stage, bool last_stage);

 private:
  const int stage_;
  Mutex mutex_;
  bool on_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<TraceEvent> events_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace treadle
