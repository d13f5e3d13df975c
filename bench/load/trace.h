// Synthetic traces of requests: when they arrive, and how long their prompts and answers are.
//
// Arrivals are a Poisson process, its generalization with gamma-distributed gaps (burstiness), or
// equally spaced. Lengths are fixed, uniform or log-normal. Recorded traces: trace_file.h.
//
// Thread safety: plain values; functions are pure.
#pragma once

#include <cstdint>
#include <limits>
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
inline constexpr int32_t kBlockTokens = 512;    // of a block, but for a prompt's last one
inline constexpr int32_t kMaxTokens = 1 << 30;  // of a prompt or an answer

// How many tokens: "128", "32:512" (uniform, both ends included) or "lognormal:MEAN:STDDEV[:MAX]"
// (a length above MAX is MAX).
struct LengthRange {
  int32_t low = 1;
  int32_t high = 1;
  double mean = 0;  // of the log-normal distribution; 0: uniform
  double deviation = 0;
};
absl::StatusOr<LengthRange> ParseLengthRange(const std::string& text);

struct SyntheticTrace {
  int64_t num_requests = 100;
  double request_rate = 1.0;   // per second; 0: all at once
  double burstiness = 1.0;     // shape of the gamma gaps: 1 is Poisson, smaller is burstier;
                               // infinity: all gaps are equal
  LengthRange input{32, 512};  // defaults: ORCA section 6.2
  LengthRange output{1, 128};
  uint64_t seed = 1;
};
std::vector<TraceEntry> MakeTrace(const SyntheticTrace& options);

// Replaces the arrivals of a trace by such as `options` wants, but for those of a conversation's
// later turns.
void Schedule(const SyntheticTrace& options, std::vector<TraceEntry>& trace);

// The standard library's distributions differ between implementations, and a trace must not: these
// draw from a generator's bits.
class TraceRandom {
 public:
  explicit TraceRandom(uint64_t seed) : state_(seed) {}
  double Uniform();            // in [0, 1)
  double Normal();             // mean 0, variance 1
  double Gamma(double shape);  // scale 1
  int32_t Length(const LengthRange& lengths);

 private:
  uint64_t Next();
  uint64_t state_;
};

}  // namespace treadle
