#include "engine/local_engine.h"

#include <deque>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/stage.h"
#include "kernels/status.h"
#include "kernels/sync.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

class ThreadEngine final : public Engine {
 public:
  ThreadEngine(std::unique_ptr<Backend> backend, std::unique_ptr<Model> model,
               std::unique_ptr<Stage> stage, const LocalEngineOptions& options)
      : depth_(options.depth),
        deadline_(options.iteration_deadline),
        backend_(std::move(backend)),
        model_(std::move(model)),
        stage_(std::move(stage)) {}

  ~ThreadEngine() override {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    work_.NotifyAll();
    if (rank_.joinable()) rank_.join();
  }

  absl::Status Start(std::function<void()> wake) override {
    TREADLE_CHECK(!rank_.joinable());
    wake_ = std::move(wake);
    try {
      rank_ = std::thread([this] { RunRank(); });
    } catch (const std::system_error& error) {
      return ResourceExhausted("rank thread: ", error.what());
    }
    return absl::OkStatus();
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
    return status_.ok() && !resetting_ && rank_.joinable() && in_flight_ < depth_;
  }

  void Submit(IterationPlan plan) override {
    MutexLock lock(mutex_);
    TREADLE_CHECK(rank_.joinable());
    if (!status_.ok()) return;  // the epoch ended between HasRoom and here
    TREADLE_CHECK(!resetting_ && in_flight_ < depth_);
    if (plan.epoch != epoch_ || plan.iteration != next_iteration_) {
      EndEpoch(InvalidArgument("plan of epoch ", plan.epoch, ", iteration ", plan.iteration,
                               "; expected epoch ", epoch_, ", iteration ", next_iteration_));
      return;
    }
    ++next_iteration_;
    ++in_flight_;
    queue_.push_back({std::move(plan), SteadyClock::now()});
    work_.NotifyOne();
  }

  std::vector<IterationResult> TakeResults() override {
    MutexLock lock(mutex_);
    EnforceDeadline();
    in_flight_ -= static_cast<int>(results_.size());
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
    in_flight_ = 0;
    resetting_ = true;
    work_.NotifyOne();
  }

 private:
  struct Queued {
    IterationPlan plan;
    SteadyClock::time_point submitted;
  };
  struct Running {
    uint64_t epoch = 0;
    uint64_t iteration = 0;
    SteadyClock::time_point began;
  };

  // Nothing more of this epoch is run or returned.
  void EndEpoch(absl::Status status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    status_ = std::move(status);
    queue_.clear();
    results_.clear();
  }

  // Ends the epoch if its running iteration is late. Const, because asking is what notices it.
  void EnforceDeadline() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!running_ || running_->epoch != epoch_ || !status_.ok()) return;
    if (SteadyClock::now() - running_->began <= deadline_) return;
    EndEpoch(
        absl::DeadlineExceededError(Str("iteration ", running_->iteration, " of epoch ", epoch_,
                                        " runs longer than ", deadline_.count(), " ms")));
  }

  void RunRank() {
    while (std::optional<Queued> next = WaitForPlan()) {
      absl::StatusOr<IterationResult> result = stage_->Run(next->plan);
      Finish(*next, std::move(result));
      wake_();
    }
  }

  // The next plan to run, or nothing when the engine stops. Carries out a restart on its way.
  std::optional<Queued> WaitForPlan() ABSL_LOCKS_EXCLUDED(mutex_) {
    while (true) {
      {
        MutexLock lock(mutex_);
        while (!stopping_ && !resetting_ && queue_.empty()) work_.Wait(mutex_);
        if (stopping_) return std::nullopt;
        if (!resetting_) {
          Queued next = std::move(queue_.front());
          queue_.pop_front();
          running_ = {next.plan.epoch, next.plan.iteration, SteadyClock::now()};
          return next;
        }
        stage_->Reset();
        resetting_ = false;
      }
      wake_();
    }
  }

  void Finish(const Queued& done, absl::StatusOr<IterationResult> result)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    EnforceDeadline();
    const SteadyClock::time_point began = running_->began;
    running_.reset();
    if (done.plan.epoch != epoch_ || !status_.ok()) return;  // late, or of an epoch that is over
    if (!result.ok()) {
      EndEpoch(absl::Status(result.status().code(),
                            Str("iteration ", done.plan.iteration, " of epoch ", done.plan.epoch,
                                ": ", std::string(result.status().message()))));
      return;
    }
    result->timings.queue = std::chrono::duration<double>(began - done.submitted).count();
    results_.push_back(*std::move(result));
  }

  // Constant after Start.
  const int depth_;
  const std::chrono::milliseconds deadline_;
  std::function<void()> wake_;

  // Confined to the rank thread after Start. In this order: the stage uses the model and the
  // backend.
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Stage> stage_;

  mutable Mutex mutex_;
  CondVar work_;
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 1;  // 0 is what a plan that nobody filled in says
  uint64_t next_iteration_ ABSL_GUARDED_BY(mutex_) = 0;
  int in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  bool resetting_ ABSL_GUARDED_BY(mutex_) = false;  // the rank thread has yet to drop its sequences
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  mutable absl::Status status_ ABSL_GUARDED_BY(mutex_);
  mutable std::deque<Queued> queue_ ABSL_GUARDED_BY(mutex_);
  mutable std::vector<IterationResult> results_ ABSL_GUARDED_BY(mutex_);
  std::optional<Running> running_ ABSL_GUARDED_BY(mutex_);

  std::thread rank_;  // last: everything else outlives it
};

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> LocalEngine::Create(std::unique_ptr<Backend> backend,
                                                            std::unique_ptr<Model> model,
                                                            const LocalEngineOptions& options) {
  if (options.depth < 1) {
    return InvalidArgument("engine depth is ", options.depth, ", expected at least 1");
  }
  if (options.iteration_deadline.count() < 1) {
    return InvalidArgument("iteration deadline is ", options.iteration_deadline.count(),
                           " ms, expected at least 1");
  }
  const KvCache::Options kv{
      .page_size = options.page_size, .num_pages = options.kv_pages, .dtype = options.kv_dtype};
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Stage> stage,
                           Stage::Create(*backend, *model, options.max_batch_tokens, kv));
  return std::make_unique<ThreadEngine>(std::move(backend), std::move(model), std::move(stage),
                                        options);
}

}  // namespace treadle
