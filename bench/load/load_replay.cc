#include "bench/load/load_replay.h"

#include <algorithm>
#include <random>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/sync.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

// Requests under way, and how many have ended.
class Tally {
 public:
  void WaitBelow(int64_t limit) {
    MutexLock lock(mutex_);
    while (limit > 0 && started_ - ended_ >= limit) changed_.Wait(mutex_);
    ++started_;
  }
  void Ended() {
    MutexLock lock(mutex_);
    ++ended_;
    changed_.NotifyAll();
  }
  // Waits for all `total` to end; calls `progress` after each change.
  void WaitEnded(int64_t total, const std::function<void(double)>& progress) {
    for (int64_t seen = -1; seen < total;) {
      {
        MutexLock lock(mutex_);
        while (ended_ == seen) changed_.Wait(mutex_);
        seen = ended_;
      }
      if (progress) progress(static_cast<double>(seen) / static_cast<double>(total));
    }
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int64_t started_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
};

LoadAnswer RecordInto(RequestRecord& record, SteadyClock::time_point start, Tally& tally) {
  const auto now = [start] {
    return std::chrono::duration<double>(SteadyClock::now() - start).count();
  };
  return {.received =
              [&record, now](int32_t tokens) {
                record.token_times.insert(record.token_times.end(), static_cast<size_t>(tokens),
                                          now());
                record.output_tokens += tokens;
              },
          .ended =
              [&record, &tally, now](std::string error) {
                record.end = now();
                record.error = std::move(error);
                tally.Ended();
              }};
}

LoadRequest MakeRequest(const TraceEntry& entry, const ReplayOptions& options, int32_t vocab,
                        std::mt19937_64& random) {
  LoadRequest request;
  for (int32_t i = 0; i < entry.input_tokens; ++i) {
    request.token_ids.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(vocab)));
  }
  request.max_new_tokens = entry.output_tokens;
  request.temperature = options.temperature;
  request.ignore_eos = options.ignore_eos;
  request.timeout = options.request_timeout;
  return request;
}

absl::Status CheckTrace(const std::vector<TraceEntry>& trace, const LoadTarget::Limits& limits) {
  for (const TraceEntry& entry : trace) {
    if (int64_t{entry.input_tokens} + entry.output_tokens <= limits.max_context) continue;
    return InvalidArgument("the trace has a request of ", entry.input_tokens, " + ",
                           entry.output_tokens, " tokens, the server's context is ",
                           limits.max_context);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LoadResult> Replay(const std::vector<TraceEntry>& trace, LoadTarget& target,
                                  const ReplayOptions& options) {
  TREADLE_ASSIGN_OR_RETURN(const LoadTarget::Limits limits, target.GetLimits());
  TREADLE_RETURN_IF_ERROR(CheckTrace(trace, limits));
  std::mt19937_64 random(options.seed);
  std::vector<LoadRequest> requests;
  LoadResult result;
  for (const TraceEntry& entry : trace) {
    requests.push_back(MakeRequest(entry, options, limits.vocab, random));
    RequestRecord record;
    record.scheduled = entry.arrival;
    record.input_tokens = entry.input_tokens;
    record.token_times.reserve(static_cast<size_t>(entry.output_tokens));
    result.requests.push_back(std::move(record));
  }

  Tally tally;
  const SteadyClock::time_point start = SteadyClock::now();
  std::vector<LoadAnswer> answers;
  for (RequestRecord& record : result.requests) {
    answers.push_back(RecordInto(record, start, tally));
  }
  std::thread dispatcher([&] {
    for (size_t i = 0; i < trace.size(); ++i) {
      std::this_thread::sleep_until(start + std::chrono::duration_cast<SteadyClock::duration>(
                                                std::chrono::duration<double>(trace[i].arrival)));
      tally.WaitBelow(options.max_concurrency);
      target.Send(std::move(requests[i]), answers[i]);
    }
  });
  tally.WaitEnded(static_cast<int64_t>(trace.size()), options.progress);
  dispatcher.join();
  for (const RequestRecord& record : result.requests) {
    result.duration = std::max(result.duration, record.end);
  }
  return result;
}

}  // namespace treadle
