// Trace events on the wire. Thread safety: stateless.
#pragma once

#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/trace_events.h"

namespace treadle {

namespace control {
class Trace;
}  // namespace control

void EncodeTrace(std::span<const TraceEvent> events, control::Trace& message);
// The events' stage is `stage`, whatever was sent. InvalidArgument names the array that is wrong.
absl::StatusOr<std::vector<TraceEvent>> DecodeTrace(const control::Trace& message, int32_t stage);

}  // namespace treadle
