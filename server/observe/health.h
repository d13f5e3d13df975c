// The health of this process for grpc.health.v1, under three names with three meanings:
//
//   started  the weights are loaded and the server listens; true once and for all
//   ready    a real token has come out of the engine, its epoch stands, and nothing is draining
//   live     the serving loop turns; never the state of a worker or of another server
//
// "" and the services of --listen, treadle.v1.Inference and vllm.grpc.engine.VllmEngine, mean
// ready. Every other name is NOT_FOUND.
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/background.h"
#include "base/sync.h"
#include "net/guarded_server.h"
#include "scheduler/request/request_pool.h"
#include "server/serving_stack.h"

namespace grpc {
class CallbackGenericService;
class HealthCheckServiceInterface;
}  // namespace grpc

namespace treadle {

enum class Probe { kStarted, kReady, kLive };

// Where it stands. Thread safety: all methods from any thread.
class HealthBoard {
 public:
  HealthBoard() = default;
  HealthBoard(const HealthBoard&) = delete;
  HealthBoard& operator=(const HealthBoard&) = delete;

  void Set(Probe probe, bool serving) ABSL_LOCKS_EXCLUDED(mutex_);
  bool Get(Probe probe) const ABSL_LOCKS_EXCLUDED(mutex_);

  // A gRPC server's health service shows the board from now on, until Detach.
  void Attach(grpc::HealthCheckServiceInterface& service) ABSL_LOCKS_EXCLUDED(mutex_);
  void Detach(grpc::HealthCheckServiceInterface& service) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static void Show(grpc::HealthCheckServiceInterface& service, Probe probe, bool serving);

  mutable Mutex mutex_;
  // Before anything is loaded there is no loop that could hang.
  std::array<bool, 3> serving_ ABSL_GUARDED_BY(mutex_) = {false, false, true};
  std::vector<grpc::HealthCheckServiceInterface*> services_ ABSL_GUARDED_BY(mutex_);
};

// A plaintext port with grpc.health.v1 and nothing else: Kubernetes' probes speak no TLS.
class HealthServer {
 public:
  // Unavailable names the address if it is taken. `board` must outlive the server.
  static absl::StatusOr<std::unique_ptr<HealthServer>> Start(const std::string& listen,
                                                             HealthBoard& board);
  ~HealthServer();

  const Address& address() const { return server_->address(); }  // with the port that was taken

 private:
  explicit HealthServer(HealthBoard& board);

  HealthBoard& board_;
  // gRPC wants some service besides its own; this one answers UNIMPLEMENTED.
  const std::unique_ptr<grpc::CallbackGenericService> nothing_;
  std::unique_ptr<GuardedServer> server_;
};

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
  Clock::time_point Look();  // when to look again
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
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<PulseThread> pulse_;
};

}  // namespace treadle
