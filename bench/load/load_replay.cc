#include "bench/load/load_replay.h"

#include <algorithm>
#include <queue>
#include <random>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/sync.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

absl::Status CheckTrace(const std::vector<TraceEntry>& trace, const LoadTarget::Limits& limits) {
  for (const TraceEntry& entry : trace) {
    if (int64_t{entry.input_tokens} + entry.output_tokens > limits.max_context) {
      return InvalidArgument("the trace has a request of ", entry.input_tokens, " + ",
                             entry.output_tokens, " tokens, the server's context is ",
                             limits.max_context);
    }
    for (const int32_t id : entry.token_ids) {
      if (id < limits.vocab) continue;
      return InvalidArgument("the trace's text has the token ", id, ", the server knows ",
                             limits.vocab, ": its tokenizer is another one");
    }
  }
  return absl::OkStatus();
}

// A generator for the content of one thing of a run; splitmix64's steps keep seeds apart.
std::mt19937_64 RandomOf(uint64_t seed, uint64_t what) {
  uint64_t mixed = seed * 0x9E3779B97F4A7C15u + what;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
  return std::mt19937_64(mixed ^ (mixed >> 31));
}

void AppendRandom(std::vector<int32_t>& ids, int64_t count, int32_t vocab, std::mt19937_64 random) {
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(vocab)));
  }
}

// One replay: sends each request when it is due, from the thread that calls Run, and writes down
// what comes, from the target's.
class Run {
 public:
  Run(const std::vector<TraceEntry>& trace, LoadTarget& target, const LoadTarget::Limits& limits,
      const LoadReplayOptions& options)
      : trace_(trace), target_(target), limits_(limits), options_(options), turns_(trace.size()) {
    result_.requests.resize(trace.size());
    next_.resize(trace.size(), -1);
    for (size_t i = 0; i < trace.size(); ++i) {
      const TraceEntry& entry = trace[i];
      result_.requests[i].input_tokens = entry.input_tokens;
      result_.requests[i].token_times.reserve(static_cast<size_t>(entry.output_tokens));
      answers_.push_back(
          {[this, i] { Sent(i); },
           [this, i](int32_t tokens, std::span<const int32_t> ids) { Received(i, tokens, ids); },
           [this, i](std::string error) { Ended(i, std::move(error)); }});
      if (entry.after >= 0) {
        next_[static_cast<size_t>(entry.after)] = static_cast<int64_t>(i);
      } else {
        due_.push({entry.arrival, i});
      }
    }
  }

  LoadResult ToEnd() {
    start_ = SteadyClock::now();
    std::thread teller([this] { TellProgress(); });
    for (size_t sent = 0; sent < trace_.size(); ++sent) {
      const Due due = WaitForDue();
      if (due.request == kNone) break;
      Send(due.request);
    }
    teller.join();
    for (const LoadRecord& record : result_.requests) {
      result_.duration = std::max(result_.duration, record.end);
    }
    return std::move(result_);
  }

 private:
  static constexpr size_t kNone = ~size_t{0};
  struct Due {
    double time;
    size_t request;
    bool operator<(const Due& other) const {  // of a queue whose top is the first one due
      return std::pair(time, request) > std::pair(other.time, other.request);
    }
  };
  struct Turn {  // `prompt` and `answer`: what the next one of a conversation begins with
    std::vector<int32_t> prompt;
    std::vector<int32_t> answer;
    double may_send = 0;  // when it was due, and a place was free
  };

  double Now() const { return std::chrono::duration<double>(SteadyClock::now() - start_).count(); }
  SteadyClock::time_point At(double seconds) const {
    return start_ + std::chrono::duration_cast<SteadyClock::duration>(
                        std::chrono::duration<double>(seconds));
  }

  // kNone: nothing more will be due.
  Due WaitForDue() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    for (;;) {
      if (ended_ == trace_.size()) return {0, kNone};
      const bool full = options_.max_concurrency > 0 && running_ >= options_.max_concurrency;
      if (full || due_.empty()) {
        changed_.Wait(mutex_);
      } else if (due_.top().time > Now()) {
        changed_.WaitUntil(mutex_, At(due_.top().time));
      } else {
        break;
      }
    }
    const Due due = due_.top();
    due_.pop();
    ++running_;
    result_.requests[due.request].scheduled = due.time;
    turns_[due.request].may_send =
        options_.max_concurrency > 0 ? std::max(due.time, room_since_) : due.time;
    return due;
  }

  void Send(size_t i) {
    const TraceEntry& entry = trace_[i];
    LoadRequest request;
    request.token_ids = PromptOf(i);
    request.max_new_tokens = entry.output_tokens;
    request.temperature = options_.temperature;
    request.ignore_eos = options_.ignore_eos;
    request.wants_ids = next_[i] >= 0;
    request.timeout = options_.request_timeout;
    if (request.wants_ids) turns_[i].prompt = request.token_ids;
    result_.requests[i].input_tokens = static_cast<int32_t>(request.token_ids.size());
    target_.Send(std::move(request), answers_[i]);
  }

  std::vector<int32_t> PromptOf(size_t i) {
    const TraceEntry& entry = trace_[i];
    std::vector<int32_t> ids;
    if (entry.after >= 0) {  // its records are whole: it has ended
      Turn& before = turns_[static_cast<size_t>(entry.after)];
      ids = std::move(before.prompt);
      ids.insert(ids.end(), before.answer.begin(), before.answer.end());
    }
    ids.insert(ids.end(), entry.token_ids.begin(), entry.token_ids.end());
    if (!entry.token_ids.empty()) return ids;
    for (const int64_t block : entry.blocks) {
      AppendRandom(ids, std::min<int64_t>(kBlockTokens, entry.input_tokens - std::ssize(ids)),
                   limits_.vocab, RandomOf(options_.seed, ~static_cast<uint64_t>(block)));
    }
    AppendRandom(ids, entry.input_tokens - std::ssize(ids), limits_.vocab,
                 RandomOf(options_.seed, i));
    return ids;
  }

  void Sent(size_t i) {
    LoadRecord& record = result_.requests[i];
    record.sent = Now();
    record.lag = record.sent - turns_[i].may_send;
  }

  void Received(size_t i, int32_t tokens, std::span<const int32_t> ids) {
    LoadRecord& record = result_.requests[i];
    record.token_times.insert(record.token_times.end(), static_cast<size_t>(tokens), Now());
    record.output_tokens += tokens;
    if (next_[i] < 0) return;
    std::vector<int32_t>& answer = turns_[i].answer;
    answer.insert(answer.end(), ids.begin(), ids.end());
    AppendRandom(answer, tokens - std::ssize(ids), limits_.vocab,
                 RandomOf(options_.seed + answer.size(), ~uint64_t{i}));
  }

  void Ended(size_t i, std::string error) ABSL_LOCKS_EXCLUDED(mutex_) {
    result_.requests[i].end = Now();
    result_.requests[i].error = std::move(error);
    MutexLock lock(mutex_);
    // The sender is woken only for what it waits for: others' answers are to make nothing late.
    bool news = options_.max_concurrency > 0 && running_ == options_.max_concurrency;
    --running_;
    ++ended_;
    room_since_ = Now();
    if (const int64_t next = next_[i]; next >= 0) {
      news = true;
      const auto turn = static_cast<size_t>(next);
      const double due = Now() + trace_[turn].arrival;
      if (result_.requests[i].error.empty()) {
        due_.push({due, turn});
      } else {
        for (int64_t lost = next; lost >= 0; lost = next_[static_cast<size_t>(lost)]) {
          LoadRecord& record = result_.requests[static_cast<size_t>(lost)];
          record.scheduled = record.end = Now();
          record.error = "not sent: the turn before it failed";
          ++ended_;
        }
      }
    }
    const bool over = ended_ == trace_.size();
    if (news || over) changed_.NotifyAll();
    if (over) over_.NotifyAll();
  }

  void TellProgress() ABSL_LOCKS_EXCLUDED(mutex_) {
    constexpr std::chrono::milliseconds kEvery{100};
    for (size_t seen = 0; seen < trace_.size();) {
      {
        MutexLock lock(mutex_);
        const auto next = SteadyClock::now() + kEvery;
        while (ended_ < trace_.size() && SteadyClock::now() < next) over_.WaitUntil(mutex_, next);
        seen = ended_;
      }
      if (options_.progress) {
        options_.progress(static_cast<double>(seen) / static_cast<double>(trace_.size()));
      }
    }
  }

  const std::vector<TraceEntry>& trace_;
  LoadTarget& target_;
  const LoadTarget::Limits limits_;
  const LoadReplayOptions& options_;
  SteadyClock::time_point start_;  // of ToEnd
  std::vector<LoadAnswer> answers_;
  std::vector<int64_t> next_;  // turn, of a request; -1: none
  // A request's: of its sender, then of the server, then of the next turn's sender.
  std::vector<Turn> turns_;
  LoadResult result_;
  Mutex mutex_;
  CondVar changed_;  // for the sender
  CondVar over_;     // all have ended
  std::priority_queue<Due> due_ ABSL_GUARDED_BY(mutex_);
  int64_t running_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
  double room_since_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

absl::StatusOr<LoadResult> Replay(const std::vector<TraceEntry>& trace, LoadTarget& target,
                                  const LoadReplayOptions& options) {
  TREADLE_ASSIGN_OR_RETURN(const LoadTarget::Limits limits,
                           target.GetLimits(std::chrono::seconds(10)));
  TREADLE_RETURN_IF_ERROR(CheckTrace(trace, limits));
  return Run(trace, target, limits, options).ToEnd();
}

}  // namespace treadle
