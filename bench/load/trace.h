// Request traces: when requests arrive, and how long their prompts and answers are.
//
// Arrivals are a Poisson process, or its generalization with gamma-distributed gaps (burstiness),
// or recorded. Lengths are fixed, uniform, or recorded. Recorded traces: Mooncake's JSONL
// ({"timestamp" in ms, "input_length", "output_length"}), Azure's CSV
// (TIMESTAMP,ContextTokens,GeneratedTokens) and BurstGPT's CSV (Timestamp in s, ..., Request
// tokens, Response tokens). Thread safety: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

struct TraceEntry {
  double arrival = 0;  // seconds from the start; or from the end of the turn before it
  int32_t input_tokens = 0;
  int32_t output_tokens = 0;
  int64_t after = -1;  // the turn before it: its place in the trace; its prompt goes on from there
  std::vector<int64_t> blocks = {};  // what the prompt's blocks hold: the same where the number is
  std::vector<int32_t> token_ids = {};  // what the prompt, or this turn of it, says
};
inline constexpr int32_t kBlockTokens = 512;  // of a block

// Both ends included; "32:512" or "128".
struct LengthRange {
  int32_t low = 1;
  int32_t high = 1;
};
absl::StatusOr<LengthRange> ParseLengthRange(const std::string& text);

struct SyntheticTrace {
  int64_t num_requests = 100;
  double request_rate = 1.0;   // per second; 0: all at once
  double burstiness = 1.0;     // shape of the gamma gaps: 1 is Poisson, smaller is burstier
  LengthRange input{32, 512};  // defaults: ORCA section 6.2
  LengthRange output{1, 128};
  uint64_t seed = 1;
};
std::vector<TraceEntry> MakeTrace(const SyntheticTrace& options);

// Reads a recorded trace; the format is told by the file's first line. Arrivals are shifted to
// begin at 0 and multiplied by `time_scale`. At most `limit` entries (0: all). Errors name file and
// line.
absl::StatusOr<std::vector<TraceEntry>> ReadTrace(const std::string& path, double time_scale,
                                                  int64_t limit);

}  // namespace treadle
