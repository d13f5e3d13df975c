// The epochs of a worker, one at a time: forms the pipeline with the neighbouring stages, takes
// plans and passes them on before the ranks get them (or, as a baseline, once they have run them),
// and tells the master what becomes of them.
//
// A plan comes from the master (first stage) or on the previous stage's Follow stream. Plans of an
// old epoch are dropped; one that is out of order, or cannot be read, ends the epoch. So does a
// neighbour's stream that breaks, and any error of the ranks. An epoch that ended is taken down at
// once: its communicator is broken, its streams are closed.
//
// Thread safety: all methods from any thread, but for SetPlace and SetRanks: the task thread. Only
// the task thread waits (for the other stages where activations go through the hosts, and for an
// iteration that is being broken off); ranks that are joined on GPUs wait on their own threads.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/background.h"
#include "base/sync.h"
#include "engine/choices.h"
#include "engine/remote/control_streams.h"
#include "engine/stage_ranks.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {

namespace control {
class BeginEpoch;
class FollowHello;
class Rendezvous;
class WorkerHeartbeat;
}  // namespace control
namespace proto {
class Masks;
class Plan;
}  // namespace proto

// The message that tells the master that an epoch, or with 0 the loading, has failed.
control::WorkerMessage FailureOf(uint64_t epoch, const absl::Status& why);

struct PipelineRequest {
  uint64_t epoch = 0;
  int rank = 0;  // the stage
  int size = 1;
  std::chrono::milliseconds timeout;  // of every wait, and until all stages are there
};
// Makes the communicator between the stages of one epoch, through their hosts; may wait for the
// others. It makes one of Gloo unless a test brings its own.
using PipelineFactory = std::function<absl::StatusOr<std::unique_ptr<Communicator>>(
    const PipelineRequest&, Rendezvous&)>;

// Through Gloo. `data_interface`: as GlooOptions. Thread safety: what it makes may be called from
// any thread.
PipelineFactory GlooPipeline(const std::string& data_interface);

// The rendezvous of one epoch on a worker: what is set here goes to the master, who passes it on to
// the other workers; what they set arrives through Deliver. Thread safety: any thread.
class RelayedRendezvous final : public Rendezvous {
 public:
  // `send` must not block.
  explicit RelayedRendezvous(
      std::function<void(const std::string& key, const std::string& bytes)> send)
      : send_(std::move(send)) {}

  absl::Status Set(const std::string& key, const std::string& bytes) override {
    TREADLE_RETURN_IF_ERROR(status());
    TREADLE_RETURN_IF_ERROR(known_.Set(key, bytes));
    send_(key, bytes);
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Get(const std::string& key,
                                  std::chrono::steady_clock::time_point deadline) override {
    return known_.Get(key, deadline);
  }
  absl::Status status() override { return known_.status(); }

  // The first value of a key stays.
  void Deliver(const std::string& key, const std::string& bytes) {
    known_.Set(key, bytes).IgnoreError();
  }
  // Wakes whoever waits; the first reason stays.
  void Fail(const absl::Status& why) { known_.Cancel(why); }

 private:
  const std::function<void(const std::string&, const std::string&)> send_;
  MemoryRendezvous known_;
};

class WorkerEpoch {
 public:
  using MasterStream = std::shared_ptr<Stream<control::WorkerMessage>>;

  // Functions that join this stage to others, by data plane.
  struct Joiners {
    PipelineFactory pipeline;  // through the hosts
    RankJoiner link;           // on GPUs; empty: there are none
  };
  WorkerEpoch(Joiners joiners, ControlCredentials credentials, TaskThread& tasks)
      : joiners_(std::move(joiners)), credentials_(std::move(credentials)), tasks_(tasks) {}
  // Requires that no master is attached. Waits until all streams to next stages are closed.
  ~WorkerEpoch();

  // A master comes and goes.
  void Attach(uint64_t master, MasterStream stream);
  void Detach(const absl::Status& why);

  struct Place {
    int stage = 0;
    int stages = 1;
    std::chrono::milliseconds deadline{0};
    WireType wire = WireType::kF32;
    DataPlane data_plane = DataPlane::kGloo;
  };
  void SetPlace(const Place& place);
  // Null before they are destroyed.
  void SetRanks(StageRanks* ranks);
  // For StageRanks::Start.
  StageRanks::Events Events();

  StreamEvents<control::FollowMessage> AcceptFollow(
      std::shared_ptr<Stream<control::FollowAnswer>> stream);
  void Begin(const control::BeginEpoch& begin);
  void End(uint64_t epoch, const absl::Status& why);
  void Deliver(const control::Rendezvous& message);
  void OnMasterPlan(proto::Plan& plan);
  void OnMasks(const proto::Masks& message);

  void Describe(control::WorkerHeartbeat& heartbeat);
  // An epoch is live, and this stage is ready for its plans.
  bool Stands() {
    MutexLock lock(mutex_);
    return Ready();
  }
  void SetTracing(bool on);
  std::vector<TraceEvent> TakeTrace();

 private:
  using PreviousStream = std::shared_ptr<Stream<control::FollowAnswer>>;
  struct Epoch {
    uint64_t number = 0;
    bool live = false;
    bool ranks_ready = false;
    bool followed = false;  // the next stage has accepted our stream, or there is none
    uint64_t received = 0;  // plans
    uint64_t done = 0;
    size_t rendezvous_bytes = 0;
    std::shared_ptr<RelayedRendezvous> rendezvous;
    std::shared_ptr<Stream<control::FollowMessage>> next;
    PreviousStream previous;
    bool late_plans = false;
    // With late plans: those that the ranks have yet to run, in order.
    std::deque<std::shared_ptr<control::FollowMessage>> held;
  };
  // A hello for an epoch that has not yet begun here.
  struct EarlyFollower {
    PreviousStream stream;
    uint64_t epoch = 0;
  };

  void Form(uint64_t number, const std::string& next_address);
  absl::StatusOr<StagePipeline> JoinPipeline(uint64_t number, const Place& place,
                                             std::shared_ptr<Rendezvous> rendezvous);
  bool OpenNext(uint64_t number, const Place& place, const std::string& address);
  void EndRanks(const absl::Status& why);

  void OnFollowHello(const PreviousStream& stream, const control::FollowHello& hello);
  void AcceptPrevious(const PreviousStream& stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnPlan(proto::Plan& plan);
  void PassOn(const proto::Plan& plan);
  void OnDone(uint64_t number, absl::StatusOr<IterationResult> result);

  void Fail(uint64_t number, const absl::Status& why);
  void TakeDown(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SayReady() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsLive(uint64_t number) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return epoch_.live && epoch_.number == number;
  }
  bool Ready() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return epoch_.live && epoch_.ranks_ready && epoch_.followed;
  }

  const Joiners joiners_;
  const ControlCredentials credentials_;
  TaskThread& tasks_;

  Mutex ranks_mutex_;  // taken before mutex_, never while it is held
  StageRanks* ranks_ ABSL_GUARDED_BY(ranks_mutex_) = nullptr;

  Mutex mutex_;
  uint64_t master_ ABSL_GUARDED_BY(mutex_) = 0;
  MasterStream to_master_ ABSL_GUARDED_BY(mutex_);  // null: no master
  Place place_ ABSL_GUARDED_BY(mutex_);
  Epoch epoch_ ABSL_GUARDED_BY(mutex_);
  std::optional<EarlyFollower> early_ ABSL_GUARDED_BY(mutex_);
  int open_ ABSL_GUARDED_BY(mutex_) = 0;  // streams to next stages, those of old epochs too
  CondVar closed_;
};

}  // namespace treadle
