// The request pool (ORCA section 4.1): where requests wait and live, in arrival order.
//
// Server threads submit, cancel and finish through it; the serving loop alone changes requests.
// Bounded: at most `max_queue` waiting requests. Thread safety: as noted per method.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync.h"
#include "scheduler/request/request.h"

namespace treadle {

// Requests in a pool, live ones.
struct PoolLoad {
  int64_t waiting = 0;   // for their first iteration
  int64_t reserved = 0;  // of these: admitted, so they hold pages
  int64_t running = 0;
  int64_t queue_limit = 0;
  bool draining = false;
};

class RequestPool {
 public:
  struct Submitted {
    RequestId id = 0;
    std::shared_ptr<TokenStream> stream;
  };

  explicit RequestPool(int64_t max_queue);

  // -- any thread ---------------------------------------------------------------------------------
  // ResourceExhausted if the queue is full, Unavailable if draining or closed. Nothing is queued
  // then.
  absl::StatusOr<Submitted> Submit(RequestSpec spec) ABSL_LOCKS_EXCLUDED(mutex_);
  // The client went away, or its write stalled: the request ends with `status`. Idempotent; unknown
  // and finished ids are ignored.
  void Cancel(RequestId id, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  // A server thread found a stop string in one candidate: no further plan for it. Outranks the
  // loop's own finish reason. Idempotent.
  void FinishCandidate(RequestId id, uint32_t candidate) ABSL_LOCKS_EXCLUDED(mutex_);
  // The prefix cache forgets what requests before have left in it.
  void ForgetCached() ABSL_LOCKS_EXCLUDED(mutex_);
  // No further Submit succeeds; what was accepted goes on.
  void Drain() ABSL_LOCKS_EXCLUDED(mutex_);
  PoolLoad Load() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Wakes a loop that waits in WaitForNews.
  void Wake() ABSL_LOCKS_EXCLUDED(mutex_);

  // -- the serving loop's thread ------------------------------------------------------------------
  struct Command {
    enum class Kind : uint8_t { kCancel, kFinishCandidate } kind;
    RequestId id = 0;
    uint32_t candidate = 0;
    absl::Status status;
  };
  struct Inbox {
    std::vector<std::unique_ptr<Request>> arrivals;  // arrival order
    std::vector<Command> commands;                   // in order, after the arrivals
    bool forget_cached = false;
    bool draining = false;
  };
  // Blocks until there is news, Wake was called, or `deadline`.
  void WaitForNews(Clock::time_point deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  Inbox TakeInbox() ABSL_LOCKS_EXCLUDED(mutex_);
  // The counts that Load reports and the queue's bound uses (arrivals not taken yet are added).
  // Counts of the requests that TakeInbox has given.
  void NoteCounts(int64_t waiting, int64_t reserved, int64_t running) ABSL_LOCKS_EXCLUDED(mutex_);

  // Live requests in arrival order (waiting and running, and finished ones with plans in flight).
  std::vector<std::unique_ptr<Request>>& live() { return live_; }
  // The live request of this id, or null.
  Request* Find(RequestId id);

 private:
  void PushCommand(Command command) ABSL_LOCKS_EXCLUDED(mutex_);

  const int64_t max_queue_;

  mutable Mutex mutex_;
  CondVar news_;
  RequestId next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  Inbox inbox_ ABSL_GUARDED_BY(mutex_);
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t reserved_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t running_ ABSL_GUARDED_BY(mutex_) = 0;

  // Confined to the serving loop.
  std::vector<std::unique_ptr<Request>> live_;
};

}  // namespace treadle
