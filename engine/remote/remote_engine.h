// The engine in worker processes: the master's end of the control plane.
//
// Plans go to the first stage and results come from the last; the stages pass plans and activations
// on among themselves. An epoch ends, with a status that names the worker (stage and address) and
// the reason, when a worker is lost, is silent, or fails; when an iteration is late; when a message
// is missing, out of order or cannot be read. Restart begins the next epoch with the workers that
// are there and attaches lost ones again, whatever process serves their address by then: a new one
// loads its stage anew. If that does not succeed in time, status says why, and Restart may be
// called again.
//
// Thread safety: as Engine.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "engine/engine.h"
#include "engine/remote/remote_engine_options.h"

namespace treadle {

namespace control {
class ResultMessage;
}  // namespace control
class WorkerCluster;

class RemoteEngine final : public Engine {
 public:
  // The calling thread, and those that it starts later, get priority over compute threads
  // (thread_priority.h). Attaches to the workers, has them load their stages, and forms the first
  // epoch. Errors name the worker: unreachable or late (Unavailable, DeadlineExceeded), another
  // master's (AlreadyExists), another version, file or compute mode, or a data plane that it does
  // not have (FailedPrecondition), no memory (ResourceExhausted), its own loading errors.
  static absl::StatusOr<std::unique_ptr<RemoteEngine>> Create(RemoteEngineOptions options);
  ~RemoteEngine() override;

  int64_t kv_pages() const;
  std::string backend() const;                 // description of the first stage's
  std::vector<uint64_t> weight_bytes() const;  // of each stage

  absl::Status Start(std::function<void()> wake) override;
  int stages() const override { return stages_; }
  int depth() const override { return depth_; }
  uint64_t epoch() const override {
    MutexLock lock(mutex_);
    return epoch_;
  }
  bool HasRoom() const override;
  void Submit(IterationPlan plan) override;
  std::vector<IterationResult> TakeResults() override;
  absl::Status status() const override;
  void Restart() override;
  void SetTracing(bool on) override;
  std::vector<TraceEvent> TakeTrace() override;

 private:
  // What a result must answer to.
  struct InFlight {
    uint64_t iteration = 0;
    std::vector<std::pair<SequenceId, bool>> steps;  // and whether it samples
  };

  RemoteEngine(const RemoteEngineOptions& options, std::string fingerprint);

  void OnResult(const control::ResultMessage& message);
  absl::Status CheckResult(const IterationResult& result) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EnforceDeadline();
  void Wake();

  const int stages_;
  const int depth_;
  const std::chrono::milliseconds deadline_;
  const int64_t vocab_;
  const std::function<void()> replace_workers_;

  mutable Mutex wake_mutex_;
  std::function<void()> wake_ ABSL_GUARDED_BY(wake_mutex_);

  mutable Mutex mutex_;                         // never held while the cluster is called
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 1;  // 0 is what a plan that nobody filled in says
  uint64_t next_iteration_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<InFlight> in_flight_ ABSL_GUARDED_BY(mutex_);  // without a result
  std::vector<IterationResult> results_ ABSL_GUARDED_BY(mutex_);
  // Since when the first of in_flight_ has been the first.
  std::chrono::steady_clock::time_point first_since_ ABSL_GUARDED_BY(mutex_);

  const std::unique_ptr<WorkerCluster> cluster_;  // last: it calls back
};

}  // namespace treadle
