// The serving loop: one thread that treadles (docs/design.md, The loop).
//
// Thread safety: Start, Stop and WaitDrained from the owner's thread; turns and engine_stands from
// any; everything else happens on the loop's own thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "base/sync.h"
#include "scheduler/loop_core.h"

namespace treadle {

class ServingLoop {
 public:
  using Options = LoopCore::Options;

  ServingLoop(Engine& engine, KvSlotManager& kv, RequestPool& pool, Policy& policy, Ledger& ledger,
              const TimeSource& time, const Options& options);
  ~ServingLoop();  // stops

  // Starts the engine and the loop's thread. `measure`: called between the two.
  absl::Status Start(const std::function<void(LoopCore&)>& measure = {});
  // Ends every request that is left with `status` and joins the thread. Idempotent.
  void Stop(absl::Status status);
  // Waits until the pool is draining and empty; false if `deadline` came first.
  bool WaitDrained(Clock::time_point deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  // Increases while the loop turns.
  uint64_t turns() const { return turns_.load(std::memory_order_relaxed); }
  // Whether the engine took plans at the end of the last turn: false while an epoch is being
  // formed, and once it was given up.
  bool engine_stands() const { return engine_stands_.load(std::memory_order_relaxed); }

 private:
  // The callback of the engine's threads. It outlives the loop with them, and then wakes nobody.
  struct Bell {
    explicit Bell(RequestPool* wakes) : pool(wakes) {}
    void Ring() ABSL_LOCKS_EXCLUDED(mutex) {
      MutexLock lock(mutex);
      if (pool != nullptr) pool->Wake();
    }
    void Silence() ABSL_LOCKS_EXCLUDED(mutex) {
      MutexLock lock(mutex);
      pool = nullptr;
    }

    Mutex mutex;
    RequestPool* pool ABSL_GUARDED_BY(mutex);
  };

  void Run();
  void NoteDrained() ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant.
  Engine& engine_;
  RequestPool& pool_;
  const std::shared_ptr<Bell> bell_;

  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> turns_{0};
  std::atomic<bool> engine_stands_{false};

  Mutex mutex_;
  CondVar drained_changed_;
  bool drained_ ABSL_GUARDED_BY(mutex_) = false;

  // Confined to the loop's thread while it runs, to the owner's before and after.
  LoopCore core_;

  // Confined to the owner's thread.
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace treadle
