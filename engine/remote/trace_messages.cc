#include "engine/remote/trace_messages.h"

#include "base/status.h"
#include "engine/remote/control.pb.h"

namespace treadle {

void EncodeTrace(std::span<const TraceEvent> events, control::Trace& message) {
  for (const TraceEvent& event : events) {
    message.add_epoch(event.epoch);
    message.add_iteration(event.iteration);
    message.add_rank(event.rank);
    message.add_kind(static_cast<uint32_t>(event.kind));
    message.add_begin(event.begin);
    message.add_end(event.end);
  }
}

absl::StatusOr<std::vector<TraceEvent>> DecodeTrace(const control::Trace& message, int32_t stage) {
  const int count = message.epoch_size();
  const std::pair<const char*, int> sizes[] = {{"iteration", message.iteration_size()},
                                               {"rank", message.rank_size()},
                                               {"kind", message.kind_size()},
                                               {"begin", message.begin_size()},
                                               {"end", message.end_size()}};
  for (const auto& [name, size] : sizes) {
    if (size != count) {
      return InvalidArgument("trace: ", name, " has ", size, " entries, expected ", count);
    }
  }
  std::vector<TraceEvent> events(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    if (message.kind(i) >= std::size(TraceEvent::kNames)) {
      return InvalidArgument("trace: kind is ", message.kind(i));
    }
    events[i] = {.epoch = message.epoch(i),
                 .iteration = message.iteration(i),
                 .stage = stage,
                 .rank = message.rank(i),
                 .kind = static_cast<TraceEvent::Kind>(message.kind(i)),
                 .begin = message.begin(i),
                 .end = message.end(i)};
  }
  return events;
}

}  // namespace treadle
