// Watches a serving stack and writes on the health board what the probes shall say.
//
// Ready needs a real token: at first one request of one token goes through the scheduler and the
// engine. It is submitted before anybody else can, so that no queue limit meets it, and it is
// marked internal: users' metrics do not count it, the ledger shows it as "warm-up". If it fails
// (the engine lost a worker meanwhile), the next one is tried once the engine stands again.
//
// Live: a loop that waits is woken now and then, and has to turn; one that does not within
// `loop_patience` is not live.
//
// Thread safety: from the owner's thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "base/sync.h"
#include "scheduler/request_pool.h"
#include "server/observe/health_board.h"
#include "server/serving_stack.h"

namespace treadle {

class LoopWatch {
 public:
  struct Options {
    bool warm_up = true;  // false: ready as soon as the engine stands
    std::chrono::milliseconds loop_patience{10'000};
    std::function<void()> on_ready = {};  // once, on the watch's thread; may be empty
  };

  // `stack` (started) and `board` must outlive the watch.
  LoopWatch(ServingStack& stack, HealthBoard& board, const Options& options);
  ~LoopWatch();  // started and ready end; before the loop is stopped

  // Not ready any more. A warm-up that still waits is given up.
  void Drain() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run();
  void SubmitWarmUp();
  void FollowWarmUp();
  bool LoopTurns(Clock::time_point now);

  ServingStack& stack_;
  HealthBoard& board_;
  const Options options_;

  // The thread's, and the constructor's before it starts.
  bool warm_;
  bool told_ = false;  // on_ready
  std::optional<RequestPool::Submitted> warm_up_;
  Clock::time_point next_warm_up_;
  uint64_t turns_ = 0;
  Clock::time_point turned_;  // when turns_ was last seen to move
  Clock::time_point woken_;   // when the loop was last woken because it did not

  Mutex mutex_;
  CondVar changed_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace treadle
