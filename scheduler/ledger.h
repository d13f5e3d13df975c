// The iteration ledger: for each iteration, who was in it, how many tokens of which phase, and
// where the time went. Cheap enough to leave on (one record per iteration into a bounded ring).
//
// Thread safety: Append from the serving loop; the others from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/sync.h"
#include "engine/plan/iteration_plan.h"
#include "scheduler/request/request.h"

namespace treadle {

// One request that came, and waits.
struct LedgerArrival {
  RequestId request = 0;
  int32_t prompt_tokens = 0;
  std::string owner;  // as in RequestSpec
};

struct LedgerMember {
  RequestId request = 0;
  int32_t tokens = 0;  // inputs, but for wrong guesses
  bool initiation = false;
};

// One request that left: with what outcome.
struct LedgerEnd {
  RequestId request = 0;
  std::string client_id;
  std::string owner;  // as in RequestSpec; whose the id is
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;  // of the prompt's, which were in the prefix cache
  int32_t output_tokens = 0;
  bool internal = false;  // as in RequestSpec
  std::string reason;     // "length", "stop", "cancelled", "deadline", "refused", "error"
  double predicted_first_token = -1;  // as in Request; -1: none
  RequestTimings timings;
};

struct LedgerRecord {
  uint64_t epoch = 0;
  uint64_t iteration = 0;
  double time = 0;  // seconds since the ledger began, when the result was absorbed
  std::vector<LedgerArrival> arrivals;  // requests that came since the last record
  std::vector<LedgerMember> members;
  int64_t padding = 0;          // rows that a baseline computes beside the members', for nobody
  std::vector<LedgerEnd> ends;  // requests that ended since the last record
  int64_t waiting = 0;
  int64_t running = 0;
  int64_t free_pages = 0;  // of the scarcest kind (kv_paging.h), and of all its pages
  int64_t total_pages = 0;
  // Seconds.
  double schedule = 0;  // selecting and building the plan
  double queue = 0;     // plan waiting for the engine
  double receive = 0;   // last stage waiting for the previous stage's activations
  double compute = 0;
  double sample = 0;
  double idle = 0;  // engine without a plan before this one
  // The last stage, between its previous iteration and this one, although this one's plan was under
  // way before the engine ran empty; 0 if it was not (that is `idle`).
  double bubble = 0;
  int stages = 1;
  ExpertUse experts;  // of the last stage's layers
};

class Ledger {
 public:
  explicit Ledger(size_t capacity = 4096);

  void Append(LedgerRecord record) ABSL_LOCKS_EXCLUDED(mutex_);

  // Records with sequence number >= `next`, at most `limit`; advances `next` past them. A reader
  // that fell behind the ring skips ahead and `lost` counts what it missed.
  std::vector<std::shared_ptr<const LedgerRecord>> Read(uint64_t& next, size_t limit,
                                                        uint64_t& lost) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Blocks until a record with sequence number `next` exists, the deadline passes, or `stop` is
  // true (who makes it so calls Wake). True if the record exists.
  bool WaitFor(uint64_t next, Clock::time_point deadline,
               const std::atomic<bool>* stop = nullptr) const ABSL_LOCKS_EXCLUDED(mutex_);
  void Wake() ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t end() const ABSL_LOCKS_EXCLUDED(mutex_);

  static std::string ToJson(const LedgerRecord& record);  // one line

 private:
  const size_t capacity_;
  mutable Mutex mutex_;
  mutable CondVar appended_;
  std::vector<std::shared_ptr<const LedgerRecord>> ring_ ABSL_GUARDED_BY(mutex_);
  uint64_t end_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace treadle
