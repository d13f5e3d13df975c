#include "engine/stage_ranks.h"

#include <algorithm>
#include <deque>
#include <system_error>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "engine/stage.h"
#include "engine/stage_trace.h"
#include "kernels/collectives/memory_rendezvous.h"
#include "kernels/collectives/thread_communicator.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

double Seconds(SteadyClock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// The communicators of one epoch. Rank threads hold on to it while they are in it.
struct Epoch {
  uint64_t number = 0;
  std::vector<std::unique_ptr<Communicator>> ranks;  // empty for one rank; null: not in it
  MemoryRendezvous rendezvous;
  StagePipeline pipeline;  // its communicator goes over to rank 0's link
  std::vector<std::unique_ptr<ActivationLink>> links;  // of ranks that have joined; null: none

  void Abort(const absl::Status& why) {
    rendezvous.Cancel(why);
    if (pipeline.communicator) pipeline.communicator->Abort(why);
    for (const auto& communicator : ranks) {
      if (communicator) communicator->Abort(why);
    }
    for (const auto& link : links) {
      if (link) link->Abort(why);
    }
  }
};

struct Queued {
  IterationPlan plan;
  SteadyClock::time_point arrived;
};

class ThreadedRanks final : public StageRanks {
 public:
  ThreadedRanks(std::vector<Rank> ranks, std::vector<std::unique_ptr<Stage>> stages,
                const Options& options)
      : options_(options),
        trace_(options.stage),
        ranks_(std::move(ranks)),
        stages_(std::move(stages)),
        queues_(ranks_.size()) {}

  ~ThreadedRanks() override {
    EndEpoch(absl::CancelledError("the stage is being taken down"));
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    work_.NotifyAll();
    for (std::thread& thread : threads_) thread.join();
  }

  absl::Status Start(Events events) override {
    TREADLE_CHECK(threads_.empty());
    events_ = std::move(events);
    try {
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        threads_.emplace_back([this, rank] { RunRank(rank); });
      }
    } catch (const std::system_error& error) {
      return ResourceExhausted("rank thread: ", error.what());
    }
    return absl::OkStatus();
  }

  void BeginEpoch(uint64_t number, StagePipeline pipeline) override;
  void EndEpoch(absl::Status why) override {
    MutexLock lock(mutex_);
    End(why);
  }
  void Submit(IterationPlan plan) override;

  void SetTracing(bool on) override { trace_.Set(on); }
  std::vector<TraceEvent> TakeTrace() override { return trace_.Take(); }

 private:
  // What a rank's thread does next: join an epoch (no plan), or run a plan of the one it is in.
  struct Work {
    std::shared_ptr<Epoch> epoch;  // null: stop
    std::shared_ptr<const Queued> plan;
  };

  void End(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!standing_) return;
    standing_ = false;
    epoch_->Abort(why);
    for (auto& queue : queues_) queue.clear();
  }

  void RunRank(size_t rank);
  Work WaitForWork(size_t rank, const Epoch* current) ABSL_LOCKS_EXCLUDED(mutex_);
  void Join(size_t rank, const std::shared_ptr<Epoch>& epoch) ABSL_LOCKS_EXCLUDED(mutex_);
  void Leave(size_t rank, Epoch& epoch) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status JoinOthers(size_t rank, Epoch& epoch) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status MakeLink(size_t rank, Epoch& epoch) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether nobody will abort it any more.
  bool IsOver(const Epoch& epoch) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !standing_ || epoch_.get() != &epoch;
  }
  absl::Status AnnounceQueued(size_t rank) ABSL_LOCKS_EXCLUDED(mutex_);
  void RunQueued(const Epoch& epoch, size_t rank, std::shared_ptr<const Queued> queued);
  std::shared_ptr<const Queued> TakeAhead(const Epoch& epoch, size_t rank)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Begin(const Epoch& epoch, size_t rank, const Queued& queued);
  absl::StatusOr<IterationResult> Finish(size_t rank, const Queued& queued);
  void Report(const Epoch& epoch, size_t rank, absl::StatusOr<IterationResult> result)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  Events events_;  // constant after Start
  StageTrace trace_;

  // Element r is confined to the thread of rank r after Start. Stages use models and backends.
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<Stage>> stages_;
  SteadyClock::time_point last_end_;  // of rank 0's last iteration in the epoch

  Mutex mutex_;
  CondVar work_;
  std::shared_ptr<Epoch> epoch_ ABSL_GUARDED_BY(mutex_);
  bool standing_ ABSL_GUARDED_BY(mutex_) = false;  // not ended, though ranks may yet have to join
  size_t joined_ ABSL_GUARDED_BY(mutex_) = 0;      // ranks that are in epoch_
  uint64_t next_iteration_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::deque<std::shared_ptr<const Queued>>> queues_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::vector<std::thread> threads_;  // last: everything else outlives them
};

void ThreadedRanks::BeginEpoch(uint64_t number, StagePipeline pipeline) {
  auto epoch = std::make_shared<Epoch>();
  epoch->number = number;
  if (options_.join) {
    epoch->ranks.resize(ranks_.size());
  } else if (ranks_.size() > 1) {
    epoch->ranks = CreateThreadCommunicators(static_cast<int>(ranks_.size()), options_.timeout);
  }
  epoch->pipeline = std::move(pipeline);
  epoch->links.resize(ranks_.size());
  MutexLock lock(mutex_);
  End(absl::CancelledError("the epoch is over"));
  epoch_ = std::move(epoch);
  standing_ = true;
  joined_ = 0;
  next_iteration_ = 0;
  work_.NotifyAll();
}

void ThreadedRanks::Submit(IterationPlan plan) {
  absl::Status gap;
  const uint64_t epoch = plan.epoch;
  {
    MutexLock lock(mutex_);
    if (!standing_ || plan.epoch != epoch_->number) return;
    if (plan.iteration == next_iteration_) {
      ++next_iteration_;
      const auto queued =
          std::make_shared<const Queued>(Queued{std::move(plan), SteadyClock::now()});
      for (auto& queue : queues_) queue.push_back(queued);
      work_.NotifyAll();
      return;
    }
    gap = InvalidArgument("plan of epoch ", plan.epoch, ", iteration ", plan.iteration,
                          "; expected iteration ", next_iteration_);
    End(gap);
  }
  events_.done(epoch, gap);
}

void ThreadedRanks::RunRank(size_t rank) {
  ranks_[rank].backend->BindThread();
  std::shared_ptr<Epoch> epoch;
  while (true) {
    Work work = WaitForWork(rank, epoch.get());
    if (!work.plan && epoch) Leave(rank, *epoch);
    epoch = std::move(work.epoch);
    if (!epoch) return;
    if (!work.plan) {
      Join(rank, epoch);
      continue;
    }
    RunQueued(*epoch, rank, std::move(work.plan));
  }
}

// What the rank has of the epoch goes, on the rank's thread and when nothing uses it any more.
void ThreadedRanks::Leave(size_t rank, Epoch& epoch) {
  stages_[rank]->EndEpoch();
  std::unique_ptr<Communicator> communicator;
  std::unique_ptr<ActivationLink> link;
  MutexLock lock(mutex_);
  if (!epoch.ranks.empty()) communicator = std::move(epoch.ranks[rank]);
  link = std::move(epoch.links[rank]);
}

ThreadedRanks::Work ThreadedRanks::WaitForWork(size_t rank, const Epoch* current) {
  MutexLock lock(mutex_);
  while (true) {
    if (stopping_) return {};
    if (epoch_.get() != current) return {epoch_, nullptr};
    if (auto& queue = queues_[rank]; !queue.empty()) {
      Work work{epoch_, std::move(queue.front())};
      queue.pop_front();
      return work;
    }
    work_.Wait(mutex_);
  }
}

absl::Status ThreadedRanks::JoinOthers(size_t rank, Epoch& epoch) {
  if (!options_.join || ranks_.size() == 1) return absl::OkStatus();
  auto joined = options_.join({.backend = *ranks_[rank].backend,
                               .rank = static_cast<int>(rank),
                               .size = static_cast<int>(ranks_.size()),
                               .rendezvous = epoch.rendezvous,
                               .timeout = options_.timeout});
  TREADLE_RETURN_IF_ERROR(joined.status());
  MutexLock lock(mutex_);
  if (IsOver(epoch)) (*joined)->Abort(absl::CancelledError("the epoch is over"));
  epoch.ranks[rank] = *std::move(joined);
  return absl::OkStatus();
}

absl::Status ThreadedRanks::MakeLink(size_t rank, Epoch& epoch) {
  std::unique_ptr<Communicator> communicator;
  if (rank == 0) {
    MutexLock lock(mutex_);
    communicator = std::move(epoch.pipeline.communicator);
  }
  TREADLE_ASSIGN_OR_RETURN(
      auto link, JoinNeighbours(epoch.pipeline, std::move(communicator), static_cast<int>(rank),
                                *ranks_[rank].backend, ranks_[rank].model->config().hidden,
                                options_.max_batch_tokens));
  if (!link) return absl::OkStatus();
  MutexLock lock(mutex_);
  if (IsOver(epoch)) link->Abort(absl::CancelledError("the epoch is over"));
  epoch.links[rank] = std::move(link);
  return absl::OkStatus();
}

void ThreadedRanks::Join(size_t rank, const std::shared_ptr<Epoch>& epoch) {
  absl::Status joined = ranks_[rank].backend->Recover();
  if (joined.ok()) joined = JoinOthers(rank, *epoch);
  if (joined.ok()) joined = MakeLink(rank, *epoch);
  if (!joined.ok()) {
    Report(*epoch, rank, std::move(joined));
    return;
  }
  stages_[rank]->BeginEpoch(ranks_.size() == 1 ? nullptr : epoch->ranks[rank].get(),
                            epoch->links[rank].get());
  if (rank == 0) last_end_ = {};
  {
    MutexLock lock(mutex_);
    if (epoch_ != epoch || ++joined_ < ranks_.size() || !standing_) return;
  }
  events_.ready(epoch->number);
}

// Receives of plans that wait behind the one that runs are posted early.
absl::Status ThreadedRanks::AnnounceQueued(size_t rank) {
  std::deque<std::shared_ptr<const Queued>> waiting;
  {
    MutexLock lock(mutex_);
    waiting = queues_[rank];
  }
  for (const auto& queued : waiting) {
    TREADLE_RETURN_IF_ERROR(stages_[rank]->Announce(queued->plan));
  }
  return absl::OkStatus();
}

// Runs a plan, and those that can begin before their predecessor has finished: an asynchronous
// device always has one more to go on with.
void ThreadedRanks::RunQueued(const Epoch& epoch, size_t rank,
                              std::shared_ptr<const Queued> queued) {
  absl::Status begun = Begin(epoch, rank, *queued);
  while (begun.ok() && queued) {
    const auto next = TakeAhead(epoch, rank);
    if (next) begun = Begin(epoch, rank, *next);
    absl::StatusOr<IterationResult> result = Finish(rank, *queued);
    if (!result.ok()) begun = result.status();
    Report(epoch, rank, std::move(result));
    queued = next;
  }
  if (!begun.ok()) Report(epoch, rank, std::move(begun));
}

// The next plan, if there is one that can begin now.
std::shared_ptr<const Queued> ThreadedRanks::TakeAhead(const Epoch& epoch, size_t rank) {
  MutexLock lock(mutex_);
  auto& queue = queues_[rank];
  if (epoch_.get() != &epoch || queue.empty()) return nullptr;
  if (!stages_[rank]->CanBeginAhead(queue.front()->plan)) return nullptr;
  const auto next = std::move(queue.front());
  queue.pop_front();
  return next;
}

absl::Status ThreadedRanks::Begin(const Epoch& epoch, size_t rank, const Queued& queued) {
  Stage& stage = *stages_[rank];
  if (!epoch.links[rank]) return stage.Begin(queued.plan);
  TREADLE_RETURN_IF_ERROR(stage.Announce(queued.plan));
  TREADLE_RETURN_IF_ERROR(AnnounceQueued(rank));
  absl::Status announced;
  TREADLE_RETURN_IF_ERROR(stage.Begin(queued.plan, [&] { announced = AnnounceQueued(rank); }));
  return announced;
}

absl::StatusOr<IterationResult> ThreadedRanks::Finish(size_t rank, const Queued& queued) {
  Stage& stage = *stages_[rank];
  TREADLE_ASSIGN_OR_RETURN(IterationResult result, stage.Finish());
  if (queued.plan.steps.empty()) return result;
  const Stage::Times& times = stage.times();
  result.timings.queue = Seconds(times.began - queued.arrived);
  result.timings.receive = Seconds(times.received - times.began);
  result.timings.compute = Seconds(times.forwarded - times.received);
  result.timings.sample = Seconds(times.sampled - times.sent);
  if (rank == 0) {
    // Begun while its predecessor ran: no gap, and its time began when that one's ended.
    if (last_end_ != SteadyClock::time_point{}) {
      const double gap = Seconds(times.received - last_end_);
      result.timings.gap = std::max(gap, 0.0);
      result.timings.compute += std::min(gap, 0.0);
    }
    last_end_ = times.sampled;
  }
  const Model& model = *ranks_[rank].model;
  trace_.Add(queued.plan, queued.arrived, times, static_cast<int>(rank), model.first_stage(),
             model.last_stage());
  return result;
}

// Rank 0's results and the first failure of any rank go out.
void ThreadedRanks::Report(const Epoch& epoch, size_t rank,
                           absl::StatusOr<IterationResult> result) {
  if (result.ok() && rank != 0) return;
  {
    MutexLock lock(mutex_);
    if (!standing_ || epoch_.get() != &epoch) return;  // over, or failed before
    if (!result.ok()) End(result.status());
  }
  events_.done(epoch.number, std::move(result));
}

}  // namespace

absl::StatusOr<std::unique_ptr<StageRanks>> StageRanks::Create(std::vector<Rank> ranks,
                                                               const Options& options) {
  TREADLE_CHECK(!ranks.empty());
  std::vector<std::unique_ptr<Stage>> stages;
  for (size_t i = 0; i < ranks.size(); ++i) {
    Model& model = *ranks[i].model;
    TREADLE_CHECK(model.shard().rank == static_cast<int>(i));
    TREADLE_CHECK(model.shard().size == static_cast<int>(ranks.size()));
    TREADLE_ASSIGN_OR_RETURN(
        std::unique_ptr<Stage> stage,
        Stage::Create(*ranks[i].backend, model, options.max_batch_tokens, options.kv));
    stages.push_back(std::move(stage));
  }
  return std::make_unique<ThreadedRanks>(std::move(ranks), std::move(stages), options);
}

}  // namespace treadle
