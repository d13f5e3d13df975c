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
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "engine/choices.h"
#include "engine/engine.h"
#include "engine/plan/defaults.h"
#include "engine/remote/control_streams.h"
#include "engine/remote/iteration_limit.h"
#include "engine/replay_log.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/fingerprint.h"
#include "models/model.h"

namespace treadle {

namespace proto {
class Result;
}  // namespace proto
class WorkerCluster;

// The master's options about its workers and their model.
struct RemoteEngineOptions {
  struct Place {
    std::string address;        // the worker's control address: host:port, or unix:path
    LayerRange layers;          // contiguous, in the order of stages, all layers together
    uint64_t weight_bytes = 0;  // that loading them will take at least; 0: not known
  };
  std::vector<Place> stages;
  // Addresses of further workers, one of which takes a stage whose worker is lost at once.
  std::vector<std::string> spares;
  int tensor_parallel = 1;

  // The master's own copy. Workers' files must be the same, or they are sent its tensors.
  std::shared_ptr<const Checkpoint> checkpoint;
  bool weights_from_master = false;

  // How stages load and run: a worker is told all of it.
  int64_t max_batch_tokens = kDefaultBatchTokens;
  int64_t max_context = 0;      // 0: the model's
  std::string backend = "cpu";  // or "cuda": a GPU for each rank
  DType dtype = DType::kBF16;   // of products on a GPU
  bool deterministic = false;   // on a GPU
  ComputeMode compute = ComputeMode::kAuto;
  std::string weights;  // as WeightPlan::Parse
  std::optional<float> outlier_threshold;
  OutlierRule outlier_rule = OutlierRule::kPerRow;
  WireType wire = WireType::kF32;
  DataPlane data_plane = DataPlane::kGloo;  // kNccl: stages on GPUs, and the f32 wire

  // The cache. Pages are those of the tightest stage.
  int64_t page_size = kDefaultPageSize;
  DType kv_dtype = DType::kF16;
  PageCounts kv_pages;               // none: from the next two
  std::optional<int64_t> kv_memory;  // bytes of each stage; unset: as much as PlanKvMemory's "auto"
  int64_t max_batch_size = kDefaultBatchSize;  // sequences that auto provides for

  // Bytes in each stage but the last, for what it sent (ReplayLog).
  int64_t replay_log_memory = kDefaultReplayLogMemory;

  int depth = 0;  // plans in flight; 0: as many as stages, but 2 with a single one
  // A baseline to measure: a stage passes a plan on only once it has run it and sent its
  // activations, as where control messages travel with the data (ORCA, section 4.2, argues against
  // it). Answers are the same.
  bool late_plans = false;
  std::chrono::milliseconds iteration_deadline{120'000};
  // A worker that says nothing for so long is lost; longer where the master's own threads are late.
  std::chrono::milliseconds silence{2'000};
  std::chrono::milliseconds suspicion{100};  // for the loss behind a neighbour's failure to be seen
  std::chrono::milliseconds connect_deadline{30'000};  // for workers to be there, at every epoch
  std::chrono::milliseconds join_deadline{10'000};     // and, once they are, for it to stand
  std::string version;                                 // empty: this program's
  ControlCredentials credentials;                      // towards the workers

  std::function<void(double)> progress;  // of loading, during Create, on any thread; may be empty
  // Kills the worker there, so that another one takes its place, and says why: it is there and
  // silent, or (each stage's) an epoch did not come to stand although no worker was lost. Must
  // neither block nor call back. May be empty.
  std::function<void(const std::string& address, const std::string& why)> replace_worker;
};

class RemoteEngine final : public Engine {
 public:
  // The calling thread, and those that it starts later, get priority over compute threads
  // (thread_priority.h). Attaches to the workers, has them load their stages, and forms the first
  // epoch. Errors name the worker: unreachable or late (Unavailable, DeadlineExceeded), another
  // master's (AlreadyExists), another version, file or compute mode, or a data plane that it does
  // not have (FailedPrecondition), no memory (ResourceExhausted), its own loading errors.
  static absl::StatusOr<std::unique_ptr<RemoteEngine>> Create(RemoteEngineOptions options);
  ~RemoteEngine() override;

  PageCounts kv_pages() const;
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
  void SetMasks(uint64_t epoch, uint64_t iteration, std::vector<OutputMask> masks) override;
  absl::Status LoadAdapter(std::shared_ptr<const AdapterFile> adapter) override;
  void UnloadAdapter(uint64_t id) override;
  std::vector<IterationResult> TakeResults() override;
  absl::Status status() const override;
  void Restart() override;
  // With activations over NCCL: always all. Else those whose workers were lost and had no memory
  // that is kept, and all if an epoch ended while none was lost.
  StageRange TakeLost() override;
  int64_t replay_pages() const override;
  void SetTracing(bool on) override;
  std::vector<TraceEvent> TakeTrace() override;

 private:
  struct InFlight {
    uint64_t iteration = 0;
    int64_t tokens = 0;
    std::vector<Step> steps;  // without tokens: what a result must answer to
  };

  RemoteEngine(const RemoteEngineOptions& options, ModelIdentity identity);

  void OnResult(const proto::Result& message);
  void EnforceDeadline();
  void Wake();

  const int stages_;
  const int depth_;
  const int64_t vocab_;
  const int64_t hidden_;
  const bool through_hosts_;  // activations
  const int64_t replay_log_memory_;
  const ReplayLog::Options replay_log_;  // but for the pages

  mutable Mutex wake_mutex_;
  std::function<void()> wake_ ABSL_GUARDED_BY(wake_mutex_);

  mutable Mutex mutex_;                         // never held while the cluster is called
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 1;  // 0 is what a plan that nobody filled in says
  uint64_t next_iteration_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<InFlight> in_flight_ ABSL_GUARDED_BY(mutex_);  // without a result
  std::vector<IterationResult> results_ ABSL_GUARDED_BY(mutex_);
  // Since when the first of in_flight_ has been the first.
  std::chrono::steady_clock::time_point first_since_ ABSL_GUARDED_BY(mutex_);
  IterationLimit limit_ ABSL_GUARDED_BY(mutex_);

  const std::unique_ptr<WorkerCluster> cluster_;  // last: it calls back
};

}  // namespace treadle
