// Tells threads outside the serving loop which blocks the prefix cache holds, so that gateways can
// send a request to the replica that has most of it. A block is a page of token ids; its hash names
// it together with all blocks before it and its salt.
//
// Changes go into a ring of bounded length, which each reader reads at its own pace. A reader that
// begins, or that the ring has overtaken, first gets a snapshot of all that is held. The loop makes
// one when somebody waits for it and the last one is older than the ring, so that snapshots cost
// the loop a bounded time per change, however many readers there are and however slow they read.
//
// Thread safety: wanted, Change and Snapshot from the loop's thread; the others from any. No lock
// is held for longer than it takes to copy some pointers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/sync.h"

namespace treadle {

// A change of one block. Ids are those of the page that is stored; empty: the block was removed.
struct KvBlockEvent {
  uint64_t hash = 0;
  uint64_t parent = 0;  // hash of the block before it; 0: it is a sequence's first one
  std::vector<int32_t> ids;
};

class KvEventLog {
 public:
  using Events = std::vector<std::shared_ptr<const KvBlockEvent>>;

  // Where a reader is.
  class Cursor {
    friend class KvEventLog;
    uint64_t next_ = 0;                                 // in the ring
    std::shared_ptr<const Events> snapshot_ = nullptr;  // to be read first
    size_t read_ = 0;                                   // of the snapshot
    bool began_ = false;
  };
  struct Part {
    bool resync = false;  // forget everything: a snapshot begins
    Events events;
  };

  // `capacity`: changes in the ring.
  explicit KvEventLog(size_t capacity) : capacity_(capacity) {}

  // -- the loop -----------------------------------------------------------------------------------
  void Change(KvBlockEvent event) ABSL_LOCKS_EXCLUDED(mutex_);
  bool wanted() const { return wanted_.load(std::memory_order_relaxed); }
  // All that is held now, each block after its parent.
  void Snapshot(Events held) ABSL_LOCKS_EXCLUDED(mutex_);

  // -- readers ------------------------------------------------------------------------------------
  // The next events, at most so many. Empty without `resync`: nothing yet; if `wanted` is true
  // then, the loop must be woken.
  Part Read(Cursor& cursor, size_t most) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const size_t capacity_;
  std::atomic<bool> wanted_{false};
  Mutex mutex_;
  std::deque<std::shared_ptr<const KvBlockEvent>> ring_ ABSL_GUARDED_BY(mutex_);
  uint64_t first_ ABSL_GUARDED_BY(mutex_) = 0;  // change that the ring begins with
  std::shared_ptr<const Events> snapshot_ ABSL_GUARDED_BY(mutex_);
  uint64_t taken_at_ ABSL_GUARDED_BY(mutex_) = 0;  // the first change after the snapshot
};

}  // namespace treadle
