#include "engine/remote/worker_stage.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/remote/control.pb.h"
#include "engine/remote/thread_priority.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/status.h"

namespace treadle {
namespace {

// Runs `work` on a thread whose low priority goes over to all threads that it starts.
absl::Status RunAtLowPriority(const std::function<absl::Status()>& work) {
  absl::Status status;
  try {
    std::thread([&] {
      MakeComputeThread();
      status = work();
    }).join();
  } catch (const std::system_error& error) {
    return ResourceExhausted("loading thread: ", error.what());
  }
  return status;
}

class LoadedStage final : public WorkerStage {
 public:
  explicit LoadedStage(const control::Configure& configuration) : configuration_(configuration) {}

  absl::Status LoadRanks(const Checkpoint& checkpoint, const RankOptions& options,
                         const std::function<void(double)>& progress);

  uint64_t weight_bytes() const override { return weight_bytes_; }
  int64_t kv_heads() const override { return kv_heads_; }
  std::string backend() const override { return backend_; }
  int64_t kv_pages() const override { return kv_pages_; }
  StageRanks* ranks() override { return ranks_.get(); }
  absl::Status Reserve(int64_t kv_pages, StageRanks::Events events) override;

 private:
  absl::StatusOr<StageRanks::Rank> LoadRank(const Checkpoint& checkpoint, const LoadOptions& load,
                                            const CpuBackendOptions& cpu);

  const control::Configure configuration_;
  uint64_t weight_bytes_ = 0;
  int64_t kv_heads_ = 0;
  int64_t kv_pages_ = 0;
  std::string backend_;
  std::vector<StageRanks::Rank> loaded_;  // until ranks_ has them
  std::unique_ptr<StageRanks> ranks_;
};

absl::StatusOr<LoadOptions> LoadOptionsFrom(const control::Configure& configuration) {
  LoadOptions load;
  load.layers = {configuration.first_layer(), configuration.end_layer()};
  load.shard.size = configuration.tensor_parallel();
  load.max_batch_tokens = configuration.max_batch_tokens();
  load.max_context = configuration.max_context();
  if (!configuration.weights().empty()) {
    TREADLE_ASSIGN_OR_RETURN(load.weights, WeightPlan::Parse(configuration.weights()));
  }
  if (configuration.has_outlier_threshold()) {
    load.outlier_threshold = configuration.outlier_threshold();
  }
  load.outlier_rule =
      configuration.outliers_per_call() ? OutlierRule::kPerCall : OutlierRule::kPerRow;
  return load;
}

absl::Status LoadedStage::LoadRanks(const Checkpoint& checkpoint, const RankOptions& options,
                                    const std::function<void(double)>& progress) {
  const int degree = configuration_.tensor_parallel();
  TREADLE_ASSIGN_OR_RETURN(LoadOptions load, LoadOptionsFrom(configuration_));
  CpuBackendOptions cpu;
  cpu.threads = options.threads > 0 ? options.threads : std::max(1, UsableCpus() / degree);
  cpu.pin = options.pin;
  cpu.compute = ComputeFrom(configuration_.compute());
  for (int rank = 0; rank < degree; ++rank) {
    load.shard.rank = rank;
    load.threads = cpu.threads;
    load.progress = [&](double fraction) { progress((rank + fraction) / degree); };
    cpu.first_cpu = options.first_cpu + rank * cpu.threads;
    TREADLE_ASSIGN_OR_RETURN(loaded_.emplace_back(), LoadRank(checkpoint, load, cpu));
  }
  backend_ = loaded_[0].backend->description();
  return absl::OkStatus();
}

absl::StatusOr<StageRanks::Rank> LoadedStage::LoadRank(const Checkpoint& checkpoint,
                                                       const LoadOptions& load,
                                                       const CpuBackendOptions& cpu) {
  StageRanks::Rank rank;
  TREADLE_ASSIGN_OR_RETURN(rank.backend, CreateCpuBackend(cpu));
  TREADLE_ASSIGN_OR_RETURN(rank.model, Model::Load(checkpoint, *rank.backend, load));
  weight_bytes_ += rank.model->weight_bytes();
  kv_heads_ += rank.model->kv_heads();
  return rank;
}

absl::Status LoadedStage::Reserve(int64_t kv_pages, StageRanks::Events events) {
  TREADLE_CHECK(!ranks_);
  StageRanks::Options options;
  options.max_batch_tokens = configuration_.max_batch_tokens();
  options.kv.page_size = configuration_.page_size();
  options.kv.num_pages = kv_pages;
  options.kv.dtype = configuration_.kv_dtype() == Name(DType::kF32) ? DType::kF32 : DType::kF16;
  options.stage = configuration_.stage();
  options.timeout = std::chrono::milliseconds(configuration_.iteration_deadline_ms());
  return RunAtLowPriority([&] {
    TREADLE_ASSIGN_OR_RETURN(auto ranks, StageRanks::Create(std::move(loaded_), options));
    TREADLE_RETURN_IF_ERROR(ranks->Start(std::move(events)));
    ranks_ = std::move(ranks);
    kv_pages_ = kv_pages;
    return absl::OkStatus();
  });
}

// What would otherwise be a bug in the model's loader.
absl::Status Check(const control::Configure& configuration, const Checkpoint& checkpoint) {
  const int64_t layers = checkpoint.config().layers;
  if (configuration.first_layer() < 0 || configuration.first_layer() >= configuration.end_layer() ||
      configuration.end_layer() > layers) {
    return InvalidArgument("layers ", configuration.first_layer(), " to ",
                           configuration.end_layer(), " of ", layers);
  }
  if (configuration.tensor_parallel() < 1 || configuration.tensor_parallel() > 64) {
    return InvalidArgument("tensor-parallel degree is ", configuration.tensor_parallel(),
                           ", expected 1 to 64");
  }
  if (configuration.backend() != "cpu") {
    return Unimplemented("backend is '", configuration.backend(), "', this worker has: cpu");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerStage>> WorkerStage::Load(
    const control::Configure& configuration, const Checkpoint& checkpoint,
    const RankOptions& options, std::function<void(double)> progress) {
  TREADLE_RETURN_IF_ERROR(Check(configuration, checkpoint));
  auto stage = std::make_unique<LoadedStage>(configuration);
  TREADLE_RETURN_IF_ERROR(
      RunAtLowPriority([&] { return stage->LoadRanks(checkpoint, options, progress); }));
  return stage;
}

}  // namespace treadle
