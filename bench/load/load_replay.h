// Replays a trace of requests against something that serves, and records what a user would see.
//
// Latency counts from the *scheduled* arrival, so a slow server cannot hide its own queue behind a
// late client. Prompts are random token ids, drawn from the seed. Who serves: a server over gRPC
// (load_client.h), or a serving loop of this process (local_load.h).
//
// Thread safety: Replay is self-contained.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/trace.h"

namespace treadle {

struct LoadRequest {
  std::vector<int32_t> token_ids;  // the prompt
  int32_t max_new_tokens = 0;
  float temperature = 0;
  bool ignore_eos = true;
  std::chrono::seconds timeout{600};
};

// Where a request's answer goes. Calls come from any thread, one at a time; `ended` is the last.
class LoadAnswer {
 public:
  virtual ~LoadAnswer() = default;
  virtual void Received(int32_t tokens) = 0;
  // `error` is empty if the request completed.
  virtual void Ended(std::string error) = 0;
};

class LoadTarget {
 public:
  struct Limits {
    int64_t max_context = 0;  // prompt and generated tokens of a request
    int32_t vocab = 0;
  };
  virtual ~LoadTarget() = default;
  virtual absl::StatusOr<Limits> GetLimits() = 0;
  // Does not wait for the answer. A request that is refused ends with an error. `answer` stays
  // valid until it has Ended.
  virtual void Send(LoadRequest request, LoadAnswer& answer) = 0;
};

struct ReplayOptions {
  int64_t max_concurrency = 0;  // requests under way at once; 0: no limit
  bool ignore_eos = true;       // every answer has exactly its traced length
  float temperature = 0;
  uint64_t seed = 1;
  std::chrono::seconds request_timeout{600};
  std::function<void(int64_t done, int64_t total)> progress = {};  // may be empty
};

// What one request lived through; times in seconds.
struct RequestRecord {
  double scheduled = 0;  // arrival, from the start of the run
  int32_t input_tokens = 0;
  int32_t output_tokens = 0;        // received
  std::vector<double> token_times;  // of each received token, from the start of the run
  double end = 0;
  std::string error;  // empty: completed
};

struct LoadResult {
  double duration = 0;  // from the first scheduled arrival to the last end
  std::vector<RequestRecord> requests;
};

// Errors: the target's, and a trace whose requests exceed its context.
absl::StatusOr<LoadResult> Replay(const std::vector<TraceEntry>& trace, LoadTarget& target,
                                  const ReplayOptions& options);

}  // namespace treadle
