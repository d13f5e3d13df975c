#include "engine/local_engine.h"

#include "base/status.h"

namespace treadle {

using SteadyClock = std::chrono::steady_clock;

absl::StatusOr<std::unique_ptr<LocalEngine>> LocalEngine::Create(
    std::vector<StageRanks::Rank> ranks, const LocalEngineOptions& options) {
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
  return std::unique_ptr<LocalEngine>(new LocalEngine(std::move(stage_ranks), options));
}

absl::Status LocalEngine::Start(std::function<void()> wake) {
  TREADLE_CHECK(!wake_);
  wake_ = std::move(wake);
  TREADLE_RETURN_IF_ERROR(ranks_->Start(
      {.done = [this](uint64_t epoch,
                      absl::StatusOr<IterationResult> result) { Finish(epoch, std::move(result)); },
       .ready = [this](uint64_t epoch) { Stand(epoch); }}));
  ranks_->BeginEpoch(epoch(), {});
  MutexLock lock(mutex_);
  while (!standing_ && status_.ok()) stood_.Wait(mutex_);  // the threads do nothing else
  return status_;
}

void LocalEngine::Submit(IterationPlan plan) {
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

void LocalEngine::SetMasks(uint64_t epoch, uint64_t iteration, std::vector<OutputMask> masks) {
  const absl::Status fits = ranks_->SetMasks(epoch, iteration, std::move(masks));
  if (fits.ok()) return;
  {
    MutexLock lock(mutex_);
    if (epoch != epoch_ || !status_.ok()) return;
    EndEpoch(fits);
  }
  wake_();
}

std::vector<IterationResult> LocalEngine::TakeResults() {
  MutexLock lock(mutex_);
  EnforceDeadline();
  return std::exchange(results_, {});
}

void LocalEngine::Restart() {
  MutexLock lock(mutex_);
  EndEpoch(absl::OkStatus());
  ++epoch_;
  next_iteration_ = 0;
  standing_ = false;
  ranks_->BeginEpoch(epoch_, {});
}

// Nothing more of this epoch is run or returned.
void LocalEngine::EndEpoch(absl::Status status) {
  status_ = std::move(status);
  running_ = 0;
  results_.clear();
  ranks_->EndEpoch(status_.ok() ? absl::CancelledError("the engine restarts") : status_);
}

std::string LocalEngine::RunningIteration() const {
  return Str("iteration ", next_iteration_ - static_cast<uint64_t>(running_), " of epoch ", epoch_);
}

// Ends the epoch if its running iteration is late.
void LocalEngine::EnforceDeadline() {
  if (!status_.ok() || running_ == 0 || SteadyClock::now() - began_ <= deadline_) return;
  EndEpoch(absl::DeadlineExceededError(
      Str(RunningIteration(), " runs longer than ", deadline_.count(), " ms")));
}

void LocalEngine::Finish(uint64_t epoch, absl::StatusOr<IterationResult> result) {
  {
    MutexLock lock(mutex_);
    EnforceDeadline();
    if (epoch != epoch_) return;  // it ended while the call was on its way
    if (!status_.ok()) {
      // Late: noticed here at the latest, and the loop has to hear of it.
    } else if (!result.ok()) {
      EndEpoch({result.status().code(),
                Str(RunningIteration(), ": ", std::string(result.status().message()))});
      stood_.NotifyAll();
    } else {
      results_.push_back(*std::move(result));
      --running_;
      began_ = SteadyClock::now();  // of the next one, if there is one
    }
  }
  wake_();
}

void LocalEngine::Stand(uint64_t epoch) {
  {
    MutexLock lock(mutex_);
    if (epoch != epoch_) return;
    standing_ = true;
    stood_.NotifyAll();
    if (epoch == kFirstEpoch) return;  // Start waits for it: that is no news
  }
  wake_();
}

}  // namespace treadle
