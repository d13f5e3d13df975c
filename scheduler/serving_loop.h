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
#include "engine/engine.h"
#include "engine/kv_slot_manager.h"
#include "scheduler/ledger.h"
#include "scheduler/policy.h"
#include "scheduler/request_pool.h"

namespace treadle {

// Injectable time, so that tests decide what "now" is.
class TimeSource {
 public:
  virtual ~TimeSource() = default;
  virtual Clock::time_point Now() const = 0;
  static const TimeSource& Steady();
};

class ServingLoop {
 public:
  struct Options {
    BatchLimits limits;  // stages and depth are taken from the engine
    // A plan without steps after so long without one; releases ride on it.
    std::chrono::milliseconds heartbeat{1000};
    // Set: an engine that fails is not restarted. Every request ends, those that wait too, no more
    // are accepted, and this is called once with the reason, on the loop's thread; must not block.
    std::function<void(const absl::Status&)> give_up = {};
  };

  ServingLoop(Engine& engine, KvSlotManager& kv, RequestPool& pool, const Policy& policy,
              Ledger& ledger, const TimeSource& time, const Options& options);
  ~ServingLoop();  // stops

  // Starts the engine and the loop's thread.
  absl::Status Start();
  // Ends every request that is left with `status` and joins the thread. Idempotent.
  void Stop(absl::Status status);
  // Waits until the pool is draining and empty; false if `deadline` came first.
  bool WaitDrained(Clock::time_point deadline);
  // Increases while the loop turns.
  uint64_t turns() const;
  // Whether the engine took plans at the end of the last turn: false while an epoch is being
  // formed, and once it was given up.
  bool engine_stands() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace treadle
