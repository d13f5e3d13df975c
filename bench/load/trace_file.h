// Recorded traces of requests: Mooncake's JSONL ({"timestamp" in ms, "input_length",
// "output_length", "hash_ids": the prompt's blocks of 512 tokens}), Azure's CSV
// (TIMESTAMP,ContextTokens,GeneratedTokens), BurstGPT's CSV (Timestamp in s, ..., Request tokens,
// Response tokens), and ShareGPT's JSON ([{"conversations": [{"from": "human", "value": ...},
// ...]}]).
//
// A request without a prompt or an answer (0 tokens) failed when it was recorded, and is left out.
// Thread safety: pure, but for the file.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/trace.h"

namespace treadle {

struct TraceFileOptions {
  double time_scale = 1;  // multiplies arrivals, which are shifted to begin at 0
  int64_t limit = 0;      // at most so many requests; 0: all
  // ShareGPT's conversations have texts and no times. Each turn but the first is due when
  // its user has read the answer before it: exponentially distributed, with this mean, in seconds.
  std::function<absl::StatusOr<std::vector<int32_t>>(std::string_view text)> encode = {};
  double think_time = 1;
  uint64_t seed = 1;
};
// The format is told by how the file begins. InvalidArgument names the file, the line or the
// conversation, and what is wrong there: also lengths that are negative, and times that go
// backwards. All conversations of ShareGPT arrive at 0.
absl::StatusOr<std::vector<TraceEntry>> ReadTrace(const std::string& path,
                                                  const TraceFileOptions& options);

}  // namespace treadle
