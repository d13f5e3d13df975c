// One thread that follows the iteration ledger for everything that must not slow the loop: metrics,
// the file (which has a thread of its own), and the clients that watch. The loop only wakes it;
// records wait in the ledger's bounded ring, and a follower that falls behind the ring counts what
// it missed.
//
// Thread safety: create it before the loop starts; Subscribe and TellSubscribers from any thread;
// sinks run on the follower's thread and must not block, subscribers' functions on that of whoever
// tells them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "scheduler/ledger.h"

namespace treadle {

class LedgerFollower {
 public:
  // `lost`: records missed before this one.
  using Sink = std::function<void(const LedgerRecord& record, uint64_t lost)>;

  // The ledger must outlive the follower.
  LedgerFollower(Ledger& ledger, std::vector<Sink> sinks);
  ~LedgerFollower();

  // Handles what the ledger holds, then joins. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

  // `tell` is called whenever records were added, until it returns false; it must not block.
  void Subscribe(std::function<bool()> tell) ABSL_LOCKS_EXCLUDED(mutex_);
  void TellSubscribers() ABSL_LOCKS_EXCLUDED(mutex_);

  const Ledger& ledger() const { return ledger_; }

 private:
  void Run(uint64_t next);

  Ledger& ledger_;
  const std::vector<Sink> sinks_;
  std::atomic<bool> stopping_{false};

  Mutex mutex_;
  std::vector<std::function<bool()>> subscribers_ ABSL_GUARDED_BY(mutex_);

  std::thread thread_;
};

}  // namespace treadle
