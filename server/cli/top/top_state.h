// The knowledge of `treadle top` about a server: ledger records and load snapshots in, numbers out.
//
// An interval is what lies between two calls of Close (the first begins with the state); rates are
// over its length on this side's clock, so a record that comes late counts in the interval in which
// it comes. Thread safety: none. Pure: the clock is an argument.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace treadle::v1 {
class GetLoadResponse;
class LedgerRecord;
}  // namespace treadle::v1

namespace treadle {

// By nearest rank, in seconds.
struct TopPercentiles {
  double p50 = 0;
  double p99 = 0;
};

// A request that was in an iteration and has not ended; or one that waits for its first.
struct TopRequest {
  uint64_t id = 0;  // the server's number of it
  double seconds = 0;
  int64_t prompt_tokens = 0;
  int64_t decoded_tokens = 0;  // one fewer than there are: the first comes with the prompt's end
  // It was there before we looked: there may be more of all three.
  bool at_least = false;
  std::string key_name = {};  // of the API key that asks; empty: none, or it is not shown to us
};

// Where the time went, 0 to 1: the first five are all of it; schedule is another thread's, at the
// same time.
struct TopShares {
  double compute = 0;
  double sample = 0;
  double receive = 0;
  double bubble = 0;
  double idle = 0;
  double schedule = 0;
};

// One interval that is over.
struct TopPast {
  double token_rate = 0;  // of prompts and answers
  int64_t waiting = 0;
};

struct TopNumbers {
  // Now.
  double uptime = 0;  // seconds; 0: the server does not say
  bool draining = false;
  int64_t running = 0;
  int64_t running_limit = 0;  // sequences; 0: the server does not say
  int64_t waiting = 0;
  int64_t reserved = 0;  // of these: they hold pages
  int64_t waiting_limit = 0;
  int64_t pages_used = 0;
  int64_t pages_total = 0;
  std::vector<std::pair<std::string, int64_t>> adapters =
      {};                                // and requests that have them, the most first
  std::vector<TopRequest> longest = {};  // first the one that runs longest; at most kTopRequests
  // The same of those that wait; nothing is decoded of them.
  std::vector<TopRequest> longest_waiting = {};
  double since_iteration = 0;  // seconds since the last iteration, or since we look

  // Over the interval. Rates are per second, 0 if `seconds` is.
  double seconds = 0;
  int64_t iterations = 0;  // with a request in them
  uint64_t lost = 0;       // records that we missed
  double iterations_rate = 0;
  double prompt_rate = 0;    // tokens
  double decode_rate = 0;    // tokens
  double cached_rate = 0;    // tokens of prompts that were not run, of requests that finished
  double finished_rate = 0;  // requests that ended by themselves
  double broken_rate = 0;    // cancelled, past their deadline, or failed
  double mean_requests = 0;  // of an iteration
  double mean_tokens = 0;

  // Over `window` seconds: this interval, and those before it that ended within the window.
  double window = 0;
  std::optional<TopPercentiles> iteration = {};  // compute and sample, of the last stage
  // Only of requests that ended by themselves:
  std::optional<TopPercentiles> queued = {};
  std::optional<TopPercentiles> first_token = {};
  std::optional<TopPercentiles> per_token = {};  // after the first

  // An iteration that is under way at an interval's end counts in the one in which it ends, with
  // all of its time; nothing if there is only that.
  std::optional<TopShares> shares = {};
  std::vector<TopPast> history = {};  // the last is this interval's; at most kTopHistory
};

inline constexpr size_t kTopRequests = 32;
inline constexpr size_t kTopHistory = 60;

class TopState {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `window`: of percentiles; 0: they are of each interval alone.
  explicit TopState(Time now, std::chrono::milliseconds window = {})
      : window_(window), began_(now), last_iteration_(now), accounted_(now) {}

  // Records that it has already are ignored: a reader may begin again a little earlier.
  void Add(const v1::LedgerRecord& record, Time now);
  TopNumbers Close(const v1::GetLoadResponse& load, Time now);

 private:
  struct Running {
    Time since;
    int64_t prompt_tokens = 0;
    int64_t decoded_tokens = 0;
    bool at_least = false;
    std::string key_name = {};
  };
  struct Samples {
    std::vector<double> iteration, queued, first_token, per_token;
    Time begin, end;
    size_t size() const {
      return iteration.size() + queued.size() + first_token.size() + per_token.size();
    }
  };
  struct Interval {
    int64_t iterations = 0, members = 0, prompt_tokens = 0, decode_tokens = 0, cached_tokens = 0;
    int64_t finished = 0, broken = 0;
    uint64_t lost = 0;
    TopShares time;  // seconds
    Samples samples;
  };

  bool IsNew(const v1::LedgerRecord& record);
  void AddMembers(const v1::LedgerRecord& record, Time now);
  void AddEnds(const v1::LedgerRecord& record);
  using Requests = std::unordered_map<uint64_t, Running>;
  static std::vector<TopRequest> Longest(const Requests& requests, Time now);
  std::optional<TopShares> TakeShares(TopShares time, bool under_way, Time now);
  void Keep(Samples samples);
  std::optional<TopPercentiles> OverWindow(std::vector<double> Samples::*kind) const;

  const std::chrono::milliseconds window_;
  Time began_;           // the interval
  Time last_iteration_;  // or when we began to look
  Time accounted_;       // until when it is known what the time went to
  Interval interval_;
  std::deque<Samples> past_;  // of the window, the last interval's included
  std::deque<TopPast> history_;
  std::optional<std::pair<uint64_t, uint64_t>> last_;  // epoch, iteration
  uint64_t records_ = 0;
  Requests running_, waiting_;
  // Requests that ended lately: plans that were under way then name them once more.
  std::unordered_set<uint64_t> ended_;
  std::deque<std::pair<uint64_t, uint64_t>> ended_at_;  // records_, request
};

}  // namespace treadle
