// What a rank did when: the raw material of a timeline over all stages and ranks.
//
// Times are the machine's monotonic clock in nanoseconds, the same for all processes of one
// machine. Thread safety: values.
#pragma once

#include <cstdint>
#include <string_view>

namespace treadle {

struct TraceEvent {
  enum class Kind : uint8_t { kPlan, kReceive, kForward, kSend, kSample };
  static constexpr std::string_view kNames[] = {"plan", "receive", "forward", "send", "sample"};

  uint64_t epoch = 0;
  uint64_t iteration = 0;
  int32_t stage = 0;
  int32_t rank = 0;
  Kind kind = Kind::kPlan;  // kPlan: from the plan's arrival at the stage to the rank's start
  int64_t begin = 0;
  int64_t end = 0;

  std::string_view name() const { return kNames[static_cast<size_t>(kind)]; }
};

// Most events kept between two TakeTrace; the oldest are dropped.
inline constexpr int64_t kMaxTraceEvents = 1 << 16;

}  // namespace treadle
