// All workers as the master sees them: attaches to them, has them load, forms epochs with them, and
// notices who is lost. It knows what an epoch needs, but not plans or results.
//
// One epoch is wanted at a time. Towards it each worker goes
//   down -> greeting -> loading -> loaded -> reserving -> idle -> forming -> ready
// as its messages come; when all are idle the epoch begins, when all are ready it stands. A worker
// that was never reached is tried again until the connect deadline; any other loss or failure ends
// the epoch, and all others are told so. A worker's weights stay. If there are spares, each
// attempt that fails gives the stage to the first of them, and whom it had waits behind them.
//
// Thread safety: all methods from any thread. Callbacks come on threads of gRPC's or of this class,
// without its lock, and must not block; none comes once the destructor has returned.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/background.h"
#include "base/sync.h"
#include "engine/engine.h"
#include "engine/remote/control_streams.h"
#include "engine/remote/host_delay.h"
#include "engine/remote/received_checkpoint.h"
#include "engine/remote/remote_engine.h"
#include "models/checkpoints/fingerprint.h"

namespace treadle {

namespace control {
class AdapterLoaded;
class Failed;
class Loaded;
class Rendezvous;
class Trace;
class WorkerHello;
}  // namespace control
namespace proto {
class Masks;
class Plan;
class Result;
}  // namespace proto

class WorkerCluster {
 public:
  struct Callbacks {
    std::function<void(const proto::Result&)> result;  // of the last stage
    std::function<void()> news;                        // an epoch stands, or has ended
    std::function<void()> beat;                        // several times in an iteration deadline
  };
  WorkerCluster(const RemoteEngineOptions& options, ModelIdentity identity, Callbacks callbacks);
  ~WorkerCluster();

  // Ends the epoch before it, if there is one, and begins another; returns at once.
  void BeginEpoch(uint64_t epoch);
  // Ends it with this error, unless it is over.
  void EndEpoch(uint64_t epoch, absl::Status why);
  // Until the wanted epoch stands, or why it cannot.
  absl::Status WaitUntilStanding();

  bool standing() const {
    MutexLock lock(mutex_);
    return standing_;
  }
  // The stages around those that lost what they had since the last call: their worker's memory is
  // another than in the epoch that stood before, or a worker has said that rows are not there. All,
  // if an epoch ended while no worker was lost.
  StageRange TakeLost();
  // Why the wanted epoch ended; Ok while it stands or is being formed.
  absl::Status status() const {
    MutexLock lock(mutex_);
    return status_;
  }

  // As Engine's: every worker that has a stage answers within the iteration deadline. One that
  // takes a stage later gets all adapters before its first epoch.
  absl::Status LoadAdapter(const std::shared_ptr<const AdapterFile>& adapter);
  void UnloadAdapter(uint64_t id);

  void SendPlan(proto::Plan&& plan);
  void SendMasks(proto::Masks&& masks);
  // The stage that keeps an iteration of the epoch waiting, for an error: "stage 1 (host:port) has
  // not ...".
  std::string WhoIsLate(uint64_t iteration) const;

  // The part of an iteration's lateness that the machine's own delays explain.
  HostDelay::Clock::duration slack() const {
    MutexLock lock(mutex_);
    return delay_.slack();
  }

  void SetTracing(bool on);
  std::vector<TraceEvent> TakeTrace();

  PageCounts kv_pages() const {
    MutexLock lock(mutex_);
    return kv_pages_;
  }
  std::string backend() const {
    MutexLock lock(mutex_);
    return peers_[0].backend;
  }
  std::vector<uint64_t> weight_bytes() const;

 private:
  using TimePoint = std::chrono::steady_clock::time_point;
  enum class State { kDown, kGreeting, kLoading, kLoaded, kReserving, kIdle, kForming, kReady };

  struct Peer {
    State state = State::kDown;
    uint64_t attempt = 0;  // number of the current stream; others' events are ignored
    std::shared_ptr<Stream<control::MasterMessage>> stream;
    TimePoint retry;          // when down
    absl::Status last_error;  // of reaching it
    TimePoint heard;
    TimePoint busy;           // last known to work on what it was asked
    bool reached = false;     // by the current stream
    uint64_t memory = 0;      // identity of its cache's memory
    uint64_t held = 0;        // that of the last epoch that stood
    bool lost = false;        // what its stage had, since the last TakeLost
    std::string memory_pool;  // that it shares with those that name the same one
    uint64_t memory_available = 0;
    uint64_t weight_bytes = 0;
    int64_t kv_heads = 0;
    PageCounts kv_pages;  // reserved before
    std::string backend;
    double progress = 0;
    uint64_t received = 0;  // plans of the epoch, by its last heartbeat
    uint64_t done = 0;
    std::shared_ptr<CheckpointSender> sender;  // of its weights
    std::set<uint64_t> adapters;               // that it was sent and has not answered
  };

  std::string StageName(size_t stage) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Named(size_t stage, const absl::Status& status) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Streams.
  void Open(size_t stage) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnMessage(size_t stage, uint64_t attempt, control::WorkerMessage& message);
  void OnClosed(size_t stage, uint64_t attempt, const absl::Status& status);
  void Break(size_t stage, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Lose(size_t stage, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Messages.
  void Dispatch(size_t stage, control::WorkerMessage& message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OnHello(size_t stage, const control::WorkerHello& hello)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OnLoaded(size_t stage, const control::Loaded& loaded)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OnTrace(size_t stage, const control::Trace& trace)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OnReserved(size_t stage, uint64_t memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OnAdapter(size_t stage, const control::AdapterLoaded& loaded)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether a worker has not answered that it has the adapter.
  bool Missing(uint64_t adapter) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Unload(uint64_t adapter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnFailed(size_t stage, const control::Failed& failed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Relay(size_t stage, const control::Rendezvous& message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Answer(size_t stage, control::WorkerMessage& message);
  double MeanProgress() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The way to the wanted epoch.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AllAtLeast(State state) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PlanPages() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(absl::Status why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteDelay(TimePoint now, TimePoint next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckTimes(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckPeer(size_t stage, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  TimePoint Beat();
  void TellNews();

  const RemoteEngineOptions options_;
  const ModelIdentity identity_;
  const std::string files_;  // FilesHere
  const Callbacks callbacks_;
  const std::chrono::milliseconds heartbeat_;
  const uint64_t master_;  // drawn at random

  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::vector<Peer> peers_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> addresses_ ABSL_GUARDED_BY(mutex_);  // of each stage's worker
  std::deque<std::string> spares_ ABSL_GUARDED_BY(mutex_);      // of workers without a stage
  int open_streams_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;  // wanted
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool wanted_ ABSL_GUARDED_BY(mutex_) = false;     // epoch_ has not ended
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;      // workers were told
  bool standing_ ABSL_GUARDED_BY(mutex_) = false;   // all are ready
  bool stood_ ABSL_GUARDED_BY(mutex_) = false;      // were so at some time
  bool lost_some_ ABSL_GUARDED_BY(mutex_) = false;  // workers or rows, since the last BeginEpoch
  bool lost_all_ ABSL_GUARDED_BY(mutex_) = false;   // perhaps, since the last TakeLost
  std::map<uint64_t, std::shared_ptr<const AdapterFile>> adapters_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, absl::Status> refused_ ABSL_GUARDED_BY(mutex_);  // that are being loaded
  HostDelay delay_ ABSL_GUARDED_BY(mutex_);
  TimePoint wanted_since_ ABSL_GUARDED_BY(mutex_);
  TimePoint begun_at_ ABSL_GUARDED_BY(mutex_);
  // A failure that may be another worker's loss: told after a moment, unless that is noticed first.
  absl::Status suspicion_ ABSL_GUARDED_BY(mutex_);
  TimePoint suspicion_due_ ABSL_GUARDED_BY(mutex_);
  bool news_ ABSL_GUARDED_BY(mutex_) = false;  // to be told
  bool tracing_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<TraceEvent> trace_ ABSL_GUARDED_BY(mutex_);
  PageCounts kv_pages_ ABSL_GUARDED_BY(mutex_);  // none: not decided

  std::unique_ptr<PulseThread> pulse_;  // last
};

}  // namespace treadle
