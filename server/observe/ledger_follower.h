// One thread that follows the iteration ledger for everything that must not slow the loop: metrics,
// the JSONL file, and the clients that watch. The loop only wakes it; records wait in the ledger's
// bounded ring, and a follower that falls behind the ring counts what it missed.
//
// Thread safety: Create before the loop starts; Subscribe from any thread; sinks run on the
// follower's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "scheduler/ledger.h"
#include "server/observe/log_event.h"
#include "server/session/courier.h"

namespace treadle {

class LedgerFollower {
 public:
  // `lost`: records missed before this one.
  using Sink = std::function<void(const LedgerRecord& record, uint64_t lost)>;

  // The ledger must outlive the serving loop that appends to it; the follower may go earlier.
  LedgerFollower(Ledger& ledger, std::vector<Sink> sinks);
  ~LedgerFollower();

  // Handles what the ledger holds, then joins. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

  // `recipient` is delivered to, through `courier`, whenever records were added, until it is gone.
  void Subscribe(std::weak_ptr<Recipient> recipient) ABSL_LOCKS_EXCLUDED(mutex_);
  void NotifySubscribers() ABSL_LOCKS_EXCLUDED(mutex_);
  void SetCourier(Courier* courier) ABSL_LOCKS_EXCLUDED(mutex_);

  const Ledger& ledger() const { return ledger_; }

 private:
  // Outlives the follower: the ledger keeps its observers.
  struct Bell {
    Mutex mutex;
    CondVar rung;
    uint64_t observed ABSL_GUARDED_BY(mutex) = 0;
    bool stopping ABSL_GUARDED_BY(mutex) = false;
  };
  void Run();
  void Handle(uint64_t& next);

  Ledger& ledger_;
  const std::vector<Sink> sinks_;
  const std::shared_ptr<Bell> bell_;

  Mutex mutex_;
  std::vector<std::weak_ptr<Recipient>> subscribers_ ABSL_GUARDED_BY(mutex_);
  Courier* courier_ ABSL_GUARDED_BY(mutex_) = nullptr;

  std::thread thread_;
};

// A sink that writes one JSON line per record; an error names the file. A write that fails later is
// reported once, to `log`, and the sink goes quiet.
absl::StatusOr<LedgerFollower::Sink> OpenLedgerFile(const std::string& path, LogSink log);

}  // namespace treadle
