// The ranks of one stage in this process: one thread, backend, model and Stage each. They run the
// same plans in the same order and meet in the tensor-parallel communicator.
//
// LocalEngine and Worker are made of it: the first has one stage with all layers, the second one of
// several. It knows epochs, but neither deadlines of iterations nor who sent a plan.
//
// Thread safety: Start, BeginEpoch, EndEpoch and Submit from one thread at a time; the events are
// called on a rank's thread (a gap in the iterations: on Submit's) and must neither block nor call
// back. The destructor ends the epoch and waits for the iteration that runs.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "engine/activation_link.h"
#include "engine/engine.h"
#include "engine/kv/kv_cache.h"
#include "engine/mask_board.h"
#include "engine/plan/defaults.h"
#include "engine/plan/iteration_plan.h"
#include "engine/replay_log.h"
#include "engine/stage.h"
#include "kernels/backend.h"
#include "models/adapters/adapter_file.h"
#include "models/model.h"

namespace treadle {

// The timeline of a stage's ranks, while somebody wants it. Thread safety: any thread.
class StageTrace {
 public:
  explicit StageTrace(int stage) : stage_(stage) {}

  void Set(bool on) {
    MutexLock lock(mutex_);
    on_ = on;
  }
  // The events since the last call; the oldest beyond kMaxEvents are lost.
  std::vector<TraceEvent> Take();
  // The phases of a plan with steps that a rank has run. Nothing while it is off.
  void Add(const IterationPlan& plan, std::chrono::steady_clock::time_point arrived,
           const Stage::Times& times, int rank, bool first_stage, bool last_stage);

 private:
  static constexpr size_t kMaxEvents = 1 << 16;

  const int stage_;
  Mutex mutex_;
  bool on_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<TraceEvent> events_ ABSL_GUARDED_BY(mutex_);
};

class StageRanks {
 public:
  static constexpr int kBackgroundShare = 10;            // one part of so many
  static constexpr std::chrono::milliseconds kIdle{50};  // longer than from a token to the next
  struct Rank {
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;
  };
  struct Options {
    int64_t max_batch_tokens = kDefaultBatchTokens;
    KvCache::Options kv;
    int stage = 0;
    ReplayLog::Options replay_log = {};          // of what goes to the next stage; may be none
    std::chrono::milliseconds timeout{120'000};  // of every wait between ranks
    // How ranks of this stage are joined; empty: through this process' memory, on the CPU.
    RankJoiner join = {};
  };

  // ranks: one per tensor-parallel rank, in order; models loaded for the same layers, shard i of
  // ranks.size(). Errors: an option out of range, memory.
  static absl::StatusOr<std::unique_ptr<StageRanks>> Create(std::vector<Rank> ranks,
                                                            const Options& options);
  ~StageRanks();

  // The threads' reports. `done`: a plan of the standing epoch ran (with results of steps on the
  // last stage only) or the epoch failed, after which nothing more of it is reported. `ready`: the
  // epoch stands (every rank has dropped its sequences).
  struct Events {
    std::function<void(uint64_t epoch, absl::StatusOr<IterationResult>)> done;
    std::function<void(uint64_t epoch)> ready;
  };
  // Once, before anything else. ResourceExhausted if there are no threads to be had.
  absl::Status Start(Events events);

  // Ends the current epoch, if any, and begins another: sequences are dropped, communicators and
  // links made anew. Returns at once; `ready` says when it stands, `done` why it cannot.
  void BeginEpoch(uint64_t epoch, StagePipeline pipeline);
  // Breaks the communicators with `why` and drops what is queued; nothing more of the epoch is
  // reported. Ranks that are being joined to neighbours stop when the pipeline's rendezvous is
  // over, which is its owner's part. Idempotent.
  void EndEpoch(const absl::Status& why) {
    MutexLock lock(mutex_);
    End(why);
  }
  // Queues a plan. Plans of other epochs are dropped; iterations must be consecutive from 0, a gap
  // is a failure of the epoch.
  void Submit(IterationPlan plan);

  // Any thread. Calls `slice` on the rank's thread while no plan waits for it, until it gives
  // false: work that yields to plans between slices, of which several take turns. While plans come
  // it gets kBackgroundShare of the time, and all of it once none has come for kIdle. Slices that
  // are left when the object goes are dropped. REQUIRES: one rank.
  void AddBackground(std::function<bool()> slice) ABSL_LOCKS_EXCLUDED(mutex_);
  // Rank 0's model; constant, but for what its thread does with it.
  const Model& model() const { return *ranks_[0].model; }

  // Any thread; as Engine::SetMasks. Masks that fit no plan are an error; those not fit for their
  // plan is one of the epoch.
  absl::Status SetMasks(uint64_t epoch, uint64_t iteration, std::vector<OutputMask> masks);

  // Any thread; as Engine's.
  absl::Status LoadAdapter(const AdapterFile& file);
  void UnloadAdapter(uint64_t id);
  void UnloadAdapters();  // all

  // Any thread.
  void SetTracing(bool on) { trace_.Set(on); }
  std::vector<TraceEvent> TakeTrace() { return trace_.Take(); }

 private:
  using TimePoint = std::chrono::steady_clock::time_point;
  struct Epoch;
  struct Queued {
    IterationPlan plan;
    TimePoint arrived;
  };
  // The next work of a rank's thread: join an epoch (no plan), or run a plan of the one it is in,
  // or a slice of what is done in the background.
  struct Work {
    std::shared_ptr<Epoch> epoch;  // null, without a slice: stop
    std::shared_ptr<const Queued> plan;
    std::function<bool()> slice = {};
  };

  StageRanks(std::vector<Rank> ranks, std::vector<std::unique_ptr<Stage>> stages,
             const Options& options);

  void End(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether nobody will abort it any more.
  bool IsOver(const Epoch& epoch) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !standing_ || epoch_.get() != &epoch;
  }

  // The body of a rank's thread.
  void RunRank(size_t rank);
  Work WaitForWork(size_t rank, const Epoch* current) ABSL_LOCKS_EXCLUDED(mutex_);
  void Join(size_t rank, const std::shared_ptr<Epoch>& epoch) ABSL_LOCKS_EXCLUDED(mutex_);
  void Leave(size_t rank, Epoch& epoch) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status JoinOthers(size_t rank, Epoch& epoch) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status MakeLink(size_t rank, Epoch& epoch) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status AnnounceQueued(size_t rank) ABSL_LOCKS_EXCLUDED(mutex_);
  void RunQueued(const Epoch& epoch, size_t rank, std::shared_ptr<const Queued> queued);
  void RunSlice(std::function<bool()> slice) ABSL_LOCKS_EXCLUDED(mutex_);
  std::shared_ptr<const Queued> TakeAhead(const Epoch& epoch, size_t rank)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Begin(const Epoch& epoch, size_t rank, const Queued& queued);
  absl::StatusOr<IterationResult> Finish(size_t rank, const Queued& queued);
  std::shared_ptr<const Adapter> FindAdapter(size_t rank, uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_);
  void Report(const Epoch& epoch, size_t rank, absl::StatusOr<IterationResult> result)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  Events events_;  // constant after Start
  StageTrace trace_;

  // Element r is confined to the thread of rank r after Start. Stages use models and backends.
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<Stage>> stages_;
  std::optional<ReplayLog> replay_log_;  // of rank 0
  TimePoint last_end_;                   // of rank 0's last iteration in the epoch

  Mutex mutex_;
  CondVar work_;
  std::shared_ptr<Epoch> epoch_ ABSL_GUARDED_BY(mutex_);
  bool standing_ ABSL_GUARDED_BY(mutex_) = false;  // not ended, though ranks may yet have to join
  size_t bound_ ABSL_GUARDED_BY(mutex_) = 0;       // ranks whose threads have begun
  size_t joined_ ABSL_GUARDED_BY(mutex_) = 0;      // ranks that are in epoch_
  uint64_t next_iteration_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::deque<std::shared_ptr<const Queued>>> queues_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::function<bool()>> background_ ABSL_GUARDED_BY(mutex_);
  TimePoint plan_ended_ ABSL_GUARDED_BY(mutex_);  // rank 0's last one
  TimePoint next_slice_ ABSL_GUARDED_BY(mutex_);  // the earliest, while plans come
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // [ranks] of each.
  std::map<uint64_t, std::vector<std::shared_ptr<const Adapter>>> adapters_ ABSL_GUARDED_BY(mutex_);

  std::vector<std::thread> threads_;  // last: everything else outlives them
};

}  // namespace treadle
