// The load client: replays a trace against a Treadle server over gRPC and measures what a user
// would.
//
// Latency counts from the *scheduled* arrival, so a slow server cannot hide its own queue behind a
// late client. Prompts are random token ids, drawn from the seed. Thread safety: Replay is
// self-contained.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/trace.h"

namespace grpc {
class ChannelCredentials;
}

namespace treadle {

struct LoadClientOptions {
  std::string target;                                          // host:port
  std::shared_ptr<grpc::ChannelCredentials> credentials = {};  // null: plaintext
  std::string authorization = {};  // metadata of every call: "Bearer KEY"; empty: none
  int64_t max_concurrency = 0;     // requests under way at once; 0: no limit
  bool ignore_eos = true;          // every answer has exactly its traced length
  float temperature = 0;
  uint64_t seed = 1;
  std::chrono::seconds request_timeout{600};
  std::function<void(int64_t done, int64_t total)> progress;  // may be empty
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

absl::StatusOr<LoadResult> Replay(const std::vector<TraceEntry>& trace,
                                  const LoadClientOptions& options);

// Waits until the server says SERVING, or the deadline.
absl::Status WaitReady(const LoadClientOptions& options, std::chrono::seconds timeout);

}  // namespace treadle
