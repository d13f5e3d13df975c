// Replays a trace of requests against something that serves, and records what a user would see.
//
// Latency counts from the *scheduled* arrival, so a slow server cannot hide its own queue behind a
// late client. Prompts are random token ids, drawn from the seed. The target is a server over gRPC,
// or a serving loop of this process.
//
// Thread safety: Replay and WaitReady are self-contained.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/trace.h"

namespace treadle {

class RequestPool;
struct ClientAccess;  // server/cli/client_flags.h

struct LoadRequest {
  std::vector<int32_t> token_ids;  // the prompt
  int32_t max_new_tokens = 0;
  float temperature = 0;
  bool ignore_eos = true;
  std::chrono::seconds timeout{600};
};

// Where a request's answer goes. Calls come from any thread, one at a time; `ended` is the last.
struct LoadAnswer {
  std::function<void(int32_t tokens)> received;
  std::function<void(std::string error)> ended;  // empty: the request completed
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
  // valid until it has `ended`.
  virtual void Send(LoadRequest request, LoadAnswer& answer) = 0;
};

// A Treadle server over gRPC. target: host:port. Does not connect yet; GetLimits is the first to
// fail.
std::unique_ptr<LoadTarget> ConnectToServer(const std::string& target, const ClientAccess& access);
// Waits until that server answers, or the deadline.
absl::Status WaitReady(const std::string& target, const ClientAccess& access,
                       std::chrono::seconds timeout);

// A serving loop of this process: what a server would do, without gRPC. Requests go into `pool`,
// whose loop runs, and both outlive every answer. `end_tokens`: of requests that do not ignore the
// end of a text. Answers are recorded on the serving loop's thread, which costs it well below a
// microsecond for each request of an iteration.
std::unique_ptr<LoadTarget> LoadInProcess(RequestPool& pool, const LoadTarget::Limits& limits,
                                          std::vector<int32_t> end_tokens);

struct ReplayOptions {
  int64_t max_concurrency = 0;  // requests under way at once; 0: no limit
  bool ignore_eos = true;       // every answer has exactly its traced length
  float temperature = 0;
  uint64_t seed = 1;
  std::chrono::seconds request_timeout{600};
  std::function<void(double)> progress = {};  // 0 to 1; may be empty
};

// The times of one request, in seconds.
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
