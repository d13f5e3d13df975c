// A pipeline of stages with their ranks in this process: what a server ran in one process or in
// several, one plan at a time, with activations rounded where its wire rounded them.
//
// Plans carry their recorded epoch and iteration in errors alone; here they are numbered anew.
// Every wait ends after `timeout`. Thread safety: one thread; stages use their own.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "engine/plan/iteration_plan.h"
#include "engine/stage_ranks.h"
#include "engine/wire_codec.h"

namespace treadle {

// Runs plans, one at a time. Thread safety: one thread.
class PlanRunner {
 public:
  virtual ~PlanRunner() = default;
  // Begins without sequences.
  virtual absl::Status BeginEpoch() = 0;
  // Runs one plan to its end. After an error another epoch may begin.
  virtual absl::StatusOr<IterationResult> Run(IterationPlan plan,
                                              std::vector<OutputMask> masks) = 0;
};

class ReplayStages final : public PlanRunner {
 public:
  struct Options {
    StageRanks::Options ranks;  // of every stage
    WireType wire = WireType::kF32;
  };
  // stages: the ranks of each, in order. Errors: StageRanks'.
  static absl::StatusOr<std::unique_ptr<ReplayStages>> Create(
      std::vector<std::vector<StageRanks::Rank>> stages, const Options& options);

  // Once, for plans that name it.
  absl::Status LoadAdapter(const AdapterFile& adapter);
  // Errors: the stage that refused a plan or failed.
  absl::Status BeginEpoch() override;
  absl::StatusOr<IterationResult> Run(IterationPlan plan, std::vector<OutputMask> masks) override;

 private:
  explicit ReplayStages(const Options& options) : options_(options) {}
  absl::StatusOr<std::vector<StagePipeline>> JoinStages() const;
  void Answer(size_t stage, uint64_t epoch, absl::StatusOr<IterationResult> result)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status WaitForAll(const char* what) ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  uint64_t next_iteration_ = 0;

  Mutex mutex_;
  CondVar changed_;
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t missing_ ABSL_GUARDED_BY(mutex_) = 0;  // stages that have to answer
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  IterationResult result_ ABSL_GUARDED_BY(mutex_);  // the last stage's

  std::vector<std::unique_ptr<StageRanks>> stages_;  // last: their threads use all others
};

}  // namespace treadle
