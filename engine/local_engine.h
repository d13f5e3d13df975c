// The engine inside this process: one stage with all layers, on one thread per tensor-parallel
// rank.
//
// The ranks run the submitted plans in order. A plan is in flight from Submit until its result was
// taken, so HasRoom changes only through what the loop itself does (and when an epoch ends): what a
// policy sees at a given iteration does not depend on timing.
//
// The epoch ends with
//   InvalidArgument, NotFound   a plan of another epoch, out of order, or that cannot be applied
//                               (SequenceTable::Check names what is wrong; nothing was touched);
//   DeadlineExceeded            an iteration ran longer than iteration_deadline.
// There is no watchdog thread: lateness is noticed by the next call of TakeResults (the serving
// loop's heartbeat sees to it that there is one), and at the latest when the iteration returns.
// After Restart the next epoch stands as soon as the ranks are out of their old iteration, whose
// result is dropped. The destructor waits for the iteration that runs, and drops queued plans.
//
// Thread safety: as Engine. Backends and models go over to the ranks' threads at Start.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "engine/engine.h"
#include "engine/plan/defaults.h"
#include "engine/stage_ranks.h"

namespace treadle {

struct LocalEngineOptions {
  int64_t max_batch_tokens = kDefaultBatchTokens;  // as the model was loaded with
  int64_t page_size = kDefaultPageSize;
  PageCounts kv_pages;
  DType kv_dtype = DType::kF16;
  // Plans in flight: 2 lets a sequence's next step use the previous sample without waiting for the
  // host (docs/design.md, Algorithm 1).
  int depth = 2;
  std::chrono::milliseconds iteration_deadline{120'000};
  RankJoiner join = {};  // as StageRanks::Options
};

class LocalEngine final : public Engine {
 public:
  // ranks: as StageRanks::Create; their models hold all layers. InvalidArgument names an option
  // that is out of range; ResourceExhausted if the device has not the memory.
  static absl::StatusOr<std::unique_ptr<LocalEngine>> Create(std::vector<StageRanks::Rank> ranks,
                                                             const LocalEngineOptions& options);

  absl::Status Start(std::function<void()> wake) override;
  int stages() const override { return 1; }
  int depth() const override { return depth_; }
  uint64_t epoch() const override {
    MutexLock lock(mutex_);
    return epoch_;
  }
  bool HasRoom() const override {
    MutexLock lock(mutex_);
    return status_.ok() && standing_ && in_flight() < depth_;
  }
  void Submit(IterationPlan plan) override;
  void SetMasks(uint64_t epoch, uint64_t iteration, std::vector<OutputMask> masks) override;
  absl::Status LoadAdapter(std::shared_ptr<const AdapterFile> adapter) override {
    return ranks_->LoadAdapter(*adapter);
  }
  void UnloadAdapter(uint64_t id) override { ranks_->UnloadAdapter(id); }
  std::vector<IterationResult> TakeResults() override;
  absl::Status status() const override {
    MutexLock lock(mutex_);
    return status_;
  }
  void Restart() override;
  void SetTracing(bool on) override { ranks_->SetTracing(on); }
  std::vector<TraceEvent> TakeTrace() override { return ranks_->TakeTrace(); }

 private:
  static constexpr uint64_t kFirstEpoch = 1;  // 0 is what a plan that nobody filled in says

  LocalEngine(std::unique_ptr<StageRanks> ranks, const LocalEngineOptions& options)
      : depth_(options.depth), deadline_(options.iteration_deadline), ranks_(std::move(ranks)) {}

  int in_flight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return running_ + static_cast<int>(results_.size());
  }
  std::string RunningIteration() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndEpoch(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EnforceDeadline() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called by a rank's thread.
  void Finish(uint64_t epoch, absl::StatusOr<IterationResult> result) ABSL_LOCKS_EXCLUDED(mutex_);
  void Stand(uint64_t epoch) ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant after Start.
  const int depth_;
  const std::chrono::milliseconds deadline_;
  std::function<void()> wake_;

  mutable Mutex mutex_;
  CondVar stood_;
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = kFirstEpoch;
  uint64_t next_iteration_ ABSL_GUARDED_BY(mutex_) = 0;
  bool standing_ ABSL_GUARDED_BY(mutex_) = false;  // the ranks are in epoch_
  int running_ ABSL_GUARDED_BY(mutex_) = 0;        // plans without a result yet
  // When the oldest of them could run.
  std::chrono::steady_clock::time_point began_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::vector<IterationResult> results_ ABSL_GUARDED_BY(mutex_);

  std::unique_ptr<StageRanks> ranks_;  // last: its threads use all others
};

}  // namespace treadle
