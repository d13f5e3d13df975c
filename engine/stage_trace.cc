#include "engine/stage_trace.h"

#include <utility>

namespace treadle {
namespace {

using TimePoint = std::chrono::steady_clock::time_point;

int64_t Nanoseconds(TimePoint time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

std::vector<TraceEvent> StageTrace::Take() {
  MutexLock lock(mutex_);
  return {std::make_move_iterator(events_.begin()),
          std::make_move_iterator(std::exchange(events_, {}).end())};
}

void StageTrace::Add(const IterationPlan& plan, TimePoint arrived, const Stage::Times& times,
                     int rank, bool first_stage, bool last_stage) {
  using Kind = TraceEvent::Kind;
  const struct {
    Kind kind;
    TimePoint begin;
    TimePoint end;
    bool happened;
  } phases[] = {{Kind::kPlan, arrived, times.began, true},
                {Kind::kReceive, times.began, times.received, !first_stage},
                {Kind::kForward, times.received, times.forwarded, true},
                {Kind::kSend, times.forwarded, times.sent, !last_stage},
                {Kind::kSample, times.sent, times.sampled, last_stage}};
  MutexLock lock(mutex_);
  if (!on_) return;
  for (const auto& phase : phases) {
    if (!phase.happened) continue;
    if (static_cast<int64_t>(events_.size()) == kMaxTraceEvents) events_.pop_front();
    events_.push_back({.epoch = plan.epoch,
                       .iteration = plan.iteration,
                       .stage = stage_,
                       .rank = rank,
                       .kind = phase.kind,
                       .begin = Nanoseconds(phase.begin),
                       .end = Nanoseconds(phase.end)});
  }
}

}  // namespace treadle
