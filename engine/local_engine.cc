#include "engine/local_engine.h"

#include <deque>
#include <utility>

#include "base/status.h"
#include "base/sync.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr uint64_t kFirstEpoch = 1;  // 0 is what a plan that nobody filled in says

class ThreadEngine final : public Engine {
 public:
  ThreadEngine(std::unique_ptr<StageRanks> ranks, const LocalEngineOptions& options)
      : depth_(options.depth), deadline_(options.iteration_deadline), ranks_(std::move(ranks)) {}

  absl::Status Start(std::function<void()> wake) override {
    TREADLE_CHECK(!wake_);
    wake_ = std::move(wake);
    TREADLE_RETURN_IF_ERROR(
        ranks_->Start({.done =
                           [this](uint64_t epoch, absl::StatusOr<IterationResult> result) {
                             Finish(epoch, std::move(result));
                           },
                       .ready = [this](uint64_t epoch) { Stand(epoch); }}));
    ranks_->BeginEpoch(epoch(), {});
    MutexLock lock(mutex_);
    while (!standing_ && status_.ok()) stood_.Wait(mutex_);  // the threads do nothing else
    return status_;
  }

  int stages() const override { return 1; }
  int depth() const override { return depth_; }

  uint64_t epoch() const override {
    MutexLock lock(mutex_);
    return epoch_;
  }

  bool HasRoom() const override {
    MutexLock lock(mutex_);
    EnforceDeadline();
    return status_.ok() && standing_ && in_flight() < depth_;
  }

  void Submit(IterationPlan plan) override {
    MutexLock lock(mutex_);
    TREADLE_CHECK(wake_);
    if (!status_.ok()) return;  // the epoch ended between HasRoom and here
    TREADLE_CHECK(standing_ && in_flight() < depth_);
    if (plan.epoch != epoch_ || plan.iteration != next_iteration_) {
      EndEpoch(InvalidArgument("plan of epoch ", plan.epoch, ", iteration ", plan.iteration,
                               "; expected epoch ", epoch_, ", iteration ", next_iteration_));
      return;
    }
    ++next_iteration_;
    if (running_++ == 0) began_ = SteadyClock::now();
    ranks_->Submit(std::move(plan));
  }

  std::vector<IterationResult> TakeResults() override {
    MutexLock lock(mutex_);
    EnforceDeadline();
    return std::exchange(results_, {});
  }

  absl::Status status() const override {
    MutexLock lock(mutex_);
    EnforceDeadline();
    return status_;
  }

  void Restart() override {
    MutexLock lock(mutex_);
    EndEpoch(absl::OkStatus());
    ++epoch_;
    next_iteration_ = 0;
    standing_ = false;
    ranks_->BeginEpoch(epoch_, {});
  }

  void SetTracing(bool on) override { ranks_->SetTracing(on); }
  std::vector<TraceEvent> TakeTrace() override { return ranks_->TakeTrace(); }

 private:
  int in_flight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return running_ + static_cast<int>(results_.size());
  }

  // Nothing more of this epoch is run or returned.
  void EndEpoch(absl::Status status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    status_ = std::move(status);
    running_ = 0;
    results_.clear();
    ranks_->EndEpoch(status_.ok() ? absl::CancelledError("the engine restarts") : status_);
  }

  // Ends the epoch if its running iteration is late. Const, because asking is what notices it.
  void EnforceDeadline() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!status_.ok() || running_ == 0 || SteadyClock::now() - began_ <= deadline_) return;
    EndEpoch(absl::DeadlineExceededError(
        Str("iteration ", next_iteration_ - static_cast<uint64_t>(running_), " of epoch ", epoch_,
            " runs longer than ", deadline_.count(), " ms")));
  }

  // Called by a rank's thread.
  void Finish(uint64_t epoch, absl::StatusOr<IterationResult> result) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      MutexLock lock(mutex_);
      EnforceDeadline();
      if (epoch != epoch_) return;  // it ended while the call was on its way
      if (!status_.ok()) {
        // Late: noticed here at the latest, and the loop has to hear of it.
      } else if (!result.ok()) {
        EndEpoch(
            absl::Status(result.status().code(),
                         Str("iteration ", next_iteration_ - static_cast<uint64_t>(running_),
                             " of epoch ", epoch_, ": ", std::string(result.status().message()))));
        stood_.NotifyAll();
      } else {
        results_.push_back(*std::move(result));
        --running_;
        began_ = SteadyClock::now();  // of the next one, if there is one
      }
    }
    wake_();
  }

  void Stand(uint64_t epoch) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      MutexLock lock(mutex_);
      if (epoch != epoch_) return;
      standing_ = true;
      stood_.NotifyAll();
      if (epoch == kFirstEpoch) return;  // Start waits for it: that is no news
    }
    wake_();
  }

  // Constant after Start.
  const int depth_;
  const std::chrono::milliseconds deadline_;
  std::function<void()> wake_;

  mutable Mutex mutex_;
  CondVar stood_;
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = kFirstEpoch;
  uint64_t next_iteration_ ABSL_GUARDED_BY(mutex_) = 0;
  bool standing_ ABSL_GUARDED_BY(mutex_) = false;          // the ranks are in epoch_
  mutable int running_ ABSL_GUARDED_BY(mutex_) = 0;        // plans without a result yet
  SteadyClock::time_point began_ ABSL_GUARDED_BY(mutex_);  // when the oldest of them could run
  mutable absl::Status status_ ABSL_GUARDED_BY(mutex_);
  mutable std::vector<IterationResult> results_ ABSL_GUARDED_BY(mutex_);

  std::unique_ptr<StageRanks> ranks_;  // last: its threads use all others
};

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> LocalEngine::Create(std::vector<StageRanks::Rank> ranks,
                                                            const LocalEngineOptions& options) {
  if (options.depth < 1) {
    return InvalidArgument("engine depth is ", options.depth, ", expected at least 1");
  }
  if (options.iteration_deadline.count() < 1) {
    return InvalidArgument("iteration deadline is ", options.iteration_deadline.count(),
                           " ms, expected at least 1");
  }
  for (const StageRanks::Rank& rank : ranks) {
    TREADLE_CHECK(rank.model->first_stage() && rank.model->last_stage());
  }
  const StageRanks::Options stage{.max_batch_tokens = options.max_batch_tokens,
                                  .kv = {.page_size = options.page_size,
                                         .num_pages = options.kv_pages,
                                         .dtype = options.kv_dtype},
                                  .timeout = options.iteration_deadline,
                                  .join = options.join};
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<StageRanks> stage_ranks,
                           StageRanks::Create(std::move(ranks), stage));
  return std::make_unique<ThreadEngine>(std::move(stage_ranks), options);
}

absl::StatusOr<std::unique_ptr<Engine>> LocalEngine::Create(std::unique_ptr<Backend> backend,
                                                            std::unique_ptr<Model> model,
                                                            const LocalEngineOptions& options) {
  std::vector<StageRanks::Rank> ranks;
  ranks.push_back({std::move(backend), std::move(model)});
  return Create(std::move(ranks), options);
}

}  // namespace treadle
