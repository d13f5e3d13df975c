// Replays a trace of requests against something that serves, and records what a user would see.
//
// Latency counts from the *scheduled* arrival, so a slow server cannot hide its own queue behind a
// late client; how late the client itself was is recorded beside it. Prompts are random token ids,
// drawn from the seed, where the trace has no text. The target is a server (load_target.h), or a
// serving loop of this process.
//
// Thread safety: Replay is self-contained.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/trace.h"

namespace treadle {

class RequestPool;

struct LoadRequest {
  std::vector<int32_t> token_ids;  // the prompt
  int32_t max_new_tokens = 0;
  float temperature = 0;
  bool ignore_eos = true;
  bool wants_ids = false;  // of the answer, since another turn follows it
  std::chrono::seconds timeout{600};
};

// Where a request's answer goes. Calls come from any thread, one at a time; `ended` is the last.
struct LoadAnswer {
  std::function<void()> sent;  // once, unless the request ends before
  // `ids`: of the tokens; empty where the server does not tell.
  std::function<void(int32_t tokens, std::span<const int32_t> ids)> received;
  std::function<void(std::string error)> ended;  // empty: the request completed
};

class LoadTarget {
 public:
  // The served model, as far as it is known.
  struct Limits {
    int64_t max_context = 0;  // prompt and generated tokens of a request
    int32_t vocab = 0;
    std::string model = {};
    // The sampling parameters that the server takes where a request lacks them, as JSON; empty: it
    // does not say.
    std::string sampling_defaults = {};
  };
  virtual ~LoadTarget() = default;
  // Waits so long for a server that does not answer yet.
  virtual absl::StatusOr<Limits> GetLimits(std::chrono::seconds patience) = 0;
  // Does not wait for the answer. A request that is refused ends with an error. `answer` stays
  // valid until it has `ended`.
  virtual void Send(LoadRequest request, LoadAnswer& answer) = 0;
};

// A serving loop of this process: what a server would do, without gRPC. Requests go into `pool`,
// whose loop runs, and both outlive every answer. `end_tokens`: of requests that do not ignore the
// end of a text. Answers are recorded on the serving loop's thread, which costs it well below a
// microsecond for each request of an iteration.
std::unique_ptr<LoadTarget> LoadInProcess(RequestPool& pool, const LoadTarget::Limits& limits,
                                          std::vector<int32_t> end_tokens);

struct LoadReplayOptions {
  int64_t max_concurrency = 0;  // requests under way at once; 0: no limit
  bool ignore_eos = true;       // every answer has exactly its traced length
  float temperature = 0;
  uint64_t seed = 1;
  std::chrono::seconds request_timeout{600};
  std::function<void(double)> progress = {};  // 0 to 1; may be empty
};

// The times of one request, in seconds.
struct LoadRecord {
  double scheduled = 0;  // arrival, from the start of the run
  int32_t input_tokens = 0;
  int32_t output_tokens = 0;        // received
  std::vector<double> token_times;  // of each received token, from the start of the run
  double end = 0;
  std::string error;  // empty: completed
  double sent = 0;    // from the start of the run
  double lag = 0;     // what the client itself was late with sending: without its --max-concurrency
};

struct LoadResult {
  double duration = 0;  // from the first scheduled arrival to the last end
  std::vector<LoadRecord> requests;
};

// Errors: the target's, and a trace whose requests exceed its context. Of a conversation, what
// follows a request that failed fails with it.
absl::StatusOr<LoadResult> Replay(const std::vector<TraceEntry>& trace, LoadTarget& target,
                                  const LoadReplayOptions& options);

}  // namespace treadle
