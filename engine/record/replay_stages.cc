#include "engine/record/replay_stages.h"

#include <future>
#include <utility>

#include "base/status.h"
#include "kernels/collectives/gloo_communicator.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {

absl::StatusOr<std::unique_ptr<ReplayStages>> ReplayStages::Create(
    std::vector<std::vector<StageRanks::Rank>> stages, const Options& options) {
  std::unique_ptr<ReplayStages> replay(new ReplayStages(options));
  for (size_t i = 0; i < stages.size(); ++i) {
    StageRanks::Options of_stage = options.ranks;
    of_stage.stage = static_cast<int>(i);
    TREADLE_ASSIGN_OR_RETURN(auto ranks, StageRanks::Create(std::move(stages[i]), of_stage));
    TREADLE_RETURN_IF_ERROR(ranks->Start(
        {.done =
             [self = replay.get(), i](uint64_t epoch, absl::StatusOr<IterationResult> result) {
               self->Answer(i, epoch, std::move(result));
             },
         .ready = [self = replay.get(),
                   i](uint64_t epoch) { self->Answer(i, epoch, IterationResult()); }}));
    replay->stages_.push_back(std::move(ranks));
  }
  return replay;
}

// On a thread of the stage's.
void ReplayStages::Answer(size_t stage, uint64_t epoch, absl::StatusOr<IterationResult> result) {
  MutexLock lock(mutex_);
  if (epoch != epoch_) return;
  if (!result.ok() && status_.ok()) {
    status_ = {result.status().code(), Str("stage ", stage, ": ", result.status().message())};
  }
  if (result.ok() && stage + 1 == stages_.size()) result_ = *std::move(result);
  if (missing_ > 0) --missing_;
  changed_.NotifyAll();
}

absl::StatusOr<std::vector<StagePipeline>> ReplayStages::JoinStages() const {
  const auto count = static_cast<int>(stages_.size());
  std::vector<StagePipeline> pipelines(stages_.size());
  if (count == 1) return pipelines;
  MemoryRendezvous rendezvous;
  std::vector<std::future<absl::StatusOr<std::unique_ptr<Communicator>>>> joining;
  for (int i = 0; i < count; ++i) {
    joining.push_back(std::async(std::launch::async, [&rendezvous, i, count, this] {
      return CreateGlooCommunicator({.rank = i, .size = count, .timeout = options_.ranks.timeout},
                                    rendezvous);
    }));
  }
  absl::Status status;
  for (int i = 0; i < count; ++i) {
    auto joined = joining[i].get();
    if (!joined.ok()) {
      status.Update(joined.status());
      continue;
    }
    pipelines[i].stage = i;
    pipelines[i].stages = count;
    pipelines[i].wire = options_.wire;
    pipelines[i].communicator = *std::move(joined);
    pipelines[i].timeout = options_.ranks.timeout;
  }
  TREADLE_RETURN_IF_ERROR(status);
  return pipelines;
}

absl::Status ReplayStages::WaitForAll(const char* what) {
  const auto deadline = std::chrono::steady_clock::now() + options_.ranks.timeout;
  MutexLock lock(mutex_);
  while (missing_ > 0 && status_.ok()) {
    if (changed_.WaitUntil(mutex_, deadline)) continue;
    status_ = absl::DeadlineExceededError(
        Str(what, " takes longer than ", options_.ranks.timeout.count(), " ms"));
  }
  return status_;
}

absl::Status ReplayStages::LoadAdapter(const AdapterFile& adapter) {
  for (const auto& stage : stages_) TREADLE_RETURN_IF_ERROR(stage->LoadAdapter(adapter));
  return absl::OkStatus();
}

absl::Status ReplayStages::BeginEpoch() {
  for (const auto& stage : stages_) stage->EndEpoch(absl::CancelledError("the epoch is over"));
  next_iteration_ = 0;
  uint64_t epoch = 0;
  {
    MutexLock lock(mutex_);
    epoch = ++epoch_;
    missing_ = stages_.size();
    status_ = absl::OkStatus();
  }
  TREADLE_ASSIGN_OR_RETURN(std::vector<StagePipeline> pipelines, JoinStages());
  for (size_t i = 0; i < stages_.size(); ++i) {
    stages_[i]->BeginEpoch(epoch, std::move(pipelines[i]));
  }
  return WaitForAll("joining the stages");
}

absl::StatusOr<IterationResult> ReplayStages::Run(IterationPlan plan,
                                                  std::vector<OutputMask> masks) {
  const uint64_t recorded_epoch = plan.epoch;
  const uint64_t recorded_iteration = plan.iteration;
  plan.iteration = next_iteration_++;
  {
    MutexLock lock(mutex_);
    plan.epoch = epoch_;
    missing_ = stages_.size();
  }
  if (!masks.empty()) {
    TREADLE_RETURN_IF_ERROR(stages_.back()->SetMasks(plan.epoch, plan.iteration, std::move(masks)));
  }
  for (const auto& stage : stages_) stage->Submit(plan);
  if (const absl::Status ran = WaitForAll("an iteration"); !ran.ok()) {
    return absl::Status(ran.code(), Str("iteration ", recorded_iteration, " of epoch ",
                                        recorded_epoch, ": ", ran.message()));
  }
  MutexLock lock(mutex_);
  IterationResult result = std::exchange(result_, {});
  result.epoch = recorded_epoch;
  result.iteration = recorded_iteration;
  return result;
}

}  // namespace treadle
