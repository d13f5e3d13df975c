#include "engine/stage_ranks.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/status.h"
#include "kernels/collectives/rendezvous.h"
#include "kernels/collectives/thread_communicator.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

double Seconds(SteadyClock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

int64_t Nanoseconds(SteadyClock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

std::vector<TraceEvent> StageTrace::Take() {
  MutexLock lock(mutex_);
  const std::deque<TraceEvent> taken = std::exchange(events_, {});
  return {taken.begin(), taken.end()};
}

void StageTrace::Add(const IterationPlan& plan, SteadyClock::time_point arrived,
                     const Stage::Times& times, int rank, bool first_stage, bool last_stage) {
  using Kind = TraceEvent::Kind;
  const struct {
    Kind kind;
    SteadyClock::time_point begin, end;
    bool happened;
  } phases[] = {{Kind::kPlan, arrived, times.began, true},
                {Kind::kReceive, times.began, times.received, !first_stage},
                {Kind::kForward, times.received, times.forwarded, true},
                {Kind::kSend, times.forwarded, times.sent, !last_stage},
                {Kind::kSample, times.sent, times.sampled, last_stage}};
  MutexLock lock(mutex_);
  if (!on_) return;
  for (const auto& phase : phases) {
    if (!phase.happened) continue;
    if (events_.size() == kMaxEvents) events_.pop_front();
    events_.push_back({.epoch = plan.epoch,
                       .iteration = plan.iteration,
                       .stage = stage_,
                       .rank = rank,
                       .kind = phase.kind,
                       .begin = Nanoseconds(phase.begin),
                       .end = Nanoseconds(phase.end)});
  }
}

// The communicators of one epoch. Rank threads hold on to it while they are in it.
struct StageRanks::Epoch {
  uint64_t number = 0;
  std::vector<std::unique_ptr<Communicator>> ranks;  // empty for one rank; null: not in it
  MemoryRendezvous rendezvous;
  StagePipeline pipeline;  // its communicator goes over to rank 0's link
  std::vector<std::unique_ptr<ActivationLink>> links;  // of ranks that have joined; null: none
  MaskBoard masks;

  explicit Epoch(const MaskBoard::Options& board) : masks(board) {}
};

StageRanks::StageRanks(std::vector<Rank> ranks, std::vector<std::unique_ptr<Stage>> stages,
                       const Options& options)
    : options_(options),
      trace_(options.stage),
      ranks_(std::move(ranks)),
      stages_(std::move(stages)),
      queues_(ranks_.size()) {
  for (size_t rank = 0; rank < stages_.size(); ++rank) {
    stages_[rank]->SetAdapters([this, rank](uint64_t id) { return FindAdapter(rank, id); });
  }
}

StageRanks::~StageRanks() {
  EndEpoch(absl::CancelledError("the stage is being taken down"));
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  work_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

absl::Status StageRanks::Start(Events events) {
  TREADLE_CHECK(threads_.empty());
  events_ = std::move(events);
  try {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      threads_.emplace_back([this, rank] { RunRank(rank); });
    }
  } catch (const std::system_error& error) {
    return ResourceExhausted("rank thread: ", error.what());
  }
  MutexLock lock(mutex_);  // from here on other threads may bring adapters
  while (bound_ < ranks_.size()) work_.Wait(mutex_);
  return absl::OkStatus();
}

void StageRanks::End(const absl::Status& why) {
  if (!standing_) return;
  standing_ = false;
  epoch_->rendezvous.Cancel(why);
  epoch_->masks.Abort(why);
  if (epoch_->pipeline.communicator) epoch_->pipeline.communicator->Abort(why);
  for (const auto& communicator : epoch_->ranks) {
    if (communicator) communicator->Abort(why);
  }
  for (const auto& link : epoch_->links) {
    if (link) link->Abort(why);
  }
  for (auto& queue : queues_) queue.clear();
}

void StageRanks::BeginEpoch(uint64_t number, StagePipeline pipeline) {
  auto epoch = std::make_shared<Epoch>(MaskBoard::Options{.vocab = ranks_[0].model->config().vocab,
                                                          .ranks = static_cast<int>(ranks_.size()),
                                                          .timeout = options_.timeout});
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

void StageRanks::Submit(IterationPlan plan) {
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

void StageRanks::AddBackground(std::function<bool()> slice) {
  TREADLE_CHECK(ranks_.size() == 1);
  MutexLock lock(mutex_);
  background_.push_back(std::move(slice));
  work_.NotifyAll();
}

absl::Status StageRanks::SetMasks(uint64_t epoch, uint64_t iteration,
                                  std::vector<OutputMask> masks) {
  std::shared_ptr<Epoch> standing;
  {
    MutexLock lock(mutex_);
    if (!standing_ || epoch_->number != epoch) return absl::OkStatus();
    standing = epoch_;
  }
  return standing->masks.Put(iteration, std::move(masks));
}

// Ranks that run meanwhile lose no more than the time of their cores.
absl::Status StageRanks::LoadAdapter(const AdapterFile& file) {
  std::vector<std::shared_ptr<const Adapter>> loaded;
  for (const Rank& rank : ranks_) {
    TREADLE_ASSIGN_OR_RETURN(auto part, rank.model->LoadAdapter(file));
    loaded.push_back(std::move(part));
  }
  MutexLock lock(mutex_);
  adapters_[file.id()] = std::move(loaded);
  return absl::OkStatus();
}

void StageRanks::UnloadAdapter(uint64_t id) {
  std::vector<std::shared_ptr<const Adapter>> unloaded;  // goes without the lock
  MutexLock lock(mutex_);
  const auto found = adapters_.find(id);
  if (found == adapters_.end()) return;
  unloaded = std::move(found->second);
  adapters_.erase(found);
}

void StageRanks::UnloadAdapters() {
  decltype(adapters_) unloaded;
  MutexLock lock(mutex_);
  unloaded.swap(adapters_);
}

std::shared_ptr<const Adapter> StageRanks::FindAdapter(size_t rank, uint64_t id) {
  MutexLock lock(mutex_);
  const auto found = adapters_.find(id);
  return found == adapters_.end() ? nullptr : found->second[rank];
}

void StageRanks::RunRank(size_t rank) {
  ranks_[rank].backend->BindThread();
  {
    MutexLock lock(mutex_);
    ++bound_;
    work_.NotifyAll();
  }
  std::shared_ptr<Epoch> epoch;
  while (true) {
    Work work = WaitForWork(rank, epoch.get());
    if (work.slice) {
      RunSlice(std::move(work.slice));
      continue;
    }
    if (!work.plan && epoch) Leave(rank, *epoch);
    epoch = std::move(work.epoch);
    if (!epoch) return;
    if (!work.plan) {
      Join(rank, epoch);
      continue;
    }
    const bool serves = rank == 0 && !work.plan->plan.steps.empty();
    RunQueued(*epoch, rank, std::move(work.plan));
    MutexLock lock(mutex_);
    if (serves) plan_ended_ = SteadyClock::now();
  }
}

void StageRanks::RunSlice(std::function<bool()> slice) {
  const auto began = SteadyClock::now();
  const bool more = slice();
  const auto ended = SteadyClock::now();
  MutexLock lock(mutex_);
  next_slice_ = ended + (kBackgroundShare - 1) * (ended - began);
  if (more) background_.push_back(std::move(slice));
}

// The rank's state of the epoch goes, on the rank's thread and when nothing uses it any more.
// Where ops work in a link's own memory, other ranks may be reading from it after this one is out
// (Stage::ReceiveHidden): that link goes with the epoch, once the last rank has left.
void StageRanks::Leave(size_t rank, Epoch& epoch) {
  stages_[rank]->EndEpoch();
  std::unique_ptr<Communicator> communicator;
  std::unique_ptr<ActivationLink> link;
  MutexLock lock(mutex_);
  if (!epoch.ranks.empty()) communicator = std::move(epoch.ranks[rank]);
  if (ranks_.size() > 1 && ranks_[rank].backend->staging(StagingPlace::kHost) == nullptr) return;
  link = std::move(epoch.links[rank]);
}

StageRanks::Work StageRanks::WaitForWork(size_t rank, const Epoch* current) {
  MutexLock lock(mutex_);
  while (true) {
    if (stopping_) return {};
    if (epoch_.get() != current) return {epoch_, nullptr};
    if (auto& queue = queues_[rank]; !queue.empty()) {
      Work work{epoch_, std::move(queue.front())};
      queue.pop_front();
      return work;
    }
    if (background_.empty()) {
      work_.Wait(mutex_);
      continue;
    }
    const auto when = std::min(next_slice_, plan_ended_ + kIdle);
    if (SteadyClock::now() < when) {
      work_.WaitUntil(mutex_, when);
      continue;
    }
    Work work{nullptr, nullptr, std::move(background_.front())};
    background_.pop_front();
    return work;
  }
}

absl::Status StageRanks::JoinOthers(size_t rank, Epoch& epoch) {
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

absl::Status StageRanks::MakeLink(size_t rank, Epoch& epoch) {
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

void StageRanks::Join(size_t rank, const std::shared_ptr<Epoch>& epoch) {
  absl::Status joined = ranks_[rank].backend->Recover();
  if (joined.ok()) joined = JoinOthers(rank, *epoch);
  if (joined.ok()) joined = MakeLink(rank, *epoch);
  if (!joined.ok()) {
    Report(*epoch, rank, std::move(joined));
    return;
  }
  stages_[rank]->BeginEpoch(ranks_.size() == 1 ? nullptr : epoch->ranks[rank].get(),
                            epoch->links[rank].get(), &epoch->masks, options_.stage,
                            rank == 0 && replay_log_ ? &*replay_log_ : nullptr);
  if (rank == 0) last_end_ = {};
  {
    MutexLock lock(mutex_);
    if (epoch_ != epoch || ++joined_ < ranks_.size() || !standing_) return;
  }
  events_.ready(epoch->number);
}

// Receives of plans that wait behind the one that runs are posted early.
absl::Status StageRanks::AnnounceQueued(size_t rank) {
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
void StageRanks::RunQueued(const Epoch& epoch, size_t rank, std::shared_ptr<const Queued> queued) {
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
std::shared_ptr<const StageRanks::Queued> StageRanks::TakeAhead(const Epoch& epoch, size_t rank) {
  MutexLock lock(mutex_);
  auto& queue = queues_[rank];
  if (epoch_.get() != &epoch || queue.empty()) return nullptr;
  if (!stages_[rank]->CanBeginAhead(queue.front()->plan)) return nullptr;
  const auto next = std::move(queue.front());
  queue.pop_front();
  return next;
}

absl::Status StageRanks::Begin(const Epoch& epoch, size_t rank, const Queued& queued) {
  Stage& stage = *stages_[rank];
  if (!epoch.links[rank]) return stage.Begin(queued.plan);
  TREADLE_RETURN_IF_ERROR(stage.Announce(queued.plan));
  TREADLE_RETURN_IF_ERROR(AnnounceQueued(rank));
  absl::Status announced;
  TREADLE_RETURN_IF_ERROR(stage.Begin(queued.plan, [&] { announced = AnnounceQueued(rank); }));
  return announced;
}

absl::StatusOr<IterationResult> StageRanks::Finish(size_t rank, const Queued& queued) {
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
void StageRanks::Report(const Epoch& epoch, size_t rank, absl::StatusOr<IterationResult> result) {
  if (result.ok() && rank != 0) return;
  {
    MutexLock lock(mutex_);
    if (!standing_ || epoch_.get() != &epoch) return;  // over, or failed before
    if (!result.ok()) End(result.status());
  }
  events_.done(epoch.number, std::move(result));
}

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
  std::unique_ptr<StageRanks> made(new StageRanks(std::move(ranks), std::move(stages), options));
  if (options.replay_log.pages > 0) {
    TREADLE_ASSIGN_OR_RETURN(made->replay_log_, ReplayLog::Create(options.replay_log));
  }
  return made;
}

}  // namespace treadle
