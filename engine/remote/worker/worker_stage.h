// A worker process's stage of the model: loads its layers onto its ranks and keeps their
// StageRanks.
//
// Ranks and everything they start run at a lower priority than the control plane (nice +10), so
// that a plan is passed on while all cores compute. Thread safety: one thread at a time, but for
// what StageRanks allows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/stage_ranks.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

namespace control {
class Configure;
class Loaded;
class WorkerHello;
}  // namespace control

// GPUs for ranks of this process, one each, in order. This room does not know how they are made.
struct RankGpus {
  struct Gpu {
    std::string id;  // the same in every process of this machine
    uint64_t memory_bytes = 0;
  };
  std::vector<Gpu> gpus;
  std::string none;  // why there are none
  // Both are called for ranks below gpus.size(), the second once the first has succeeded.
  std::function<absl::StatusOr<std::unique_ptr<Backend>>(int rank, DType dtype, bool deterministic,
                                                         int threads)>
      create;
  std::function<absl::StatusOr<uint64_t>(int rank)> free_bytes;
  RankJoiner join;
  // Joins two ranks of neighbouring stages (StagePipeline::link), where `can_link` says that it can
  // be done here.
  RankJoiner link;
  std::function<absl::Status()> can_link;
};

// How this process runs ranks.
struct RankOptions {
  int threads = 0;  // of each rank; 0: the process' CPUs, shared out
  bool pin = false;
  int first_cpu = 0;  // with pin: rank r's first is first_cpu + r * threads
  RankGpus gpus = {};
};

// Describes the machine that a worker runs a stage on.
void DescribeMachine(const RankGpus& gpus, control::WorkerHello& out);

class WorkerStage {
 public:
  // Loads every rank's shard of the configuration's layers. `progress`: fraction, on another
  // thread. Errors: a configuration that cannot be, the devices', Model::Load's.
  static absl::StatusOr<std::unique_ptr<WorkerStage>> Load(const control::Configure& configuration,
                                                           const Checkpoint& checkpoint,
                                                           const RankOptions& options,
                                                           std::function<void(double)> progress);

  uint64_t weight_bytes() const { return weight_bytes_; }
  // Says what is loaded, and which memory is left. Errors: the devices'.
  absl::Status Describe(control::Loaded& out) const;
  // 0 until reserved.
  const PageCounts& kv_pages() const { return options_.kv.num_pages; }

  // Allocates the cache and starts the ranks; once. `memory`: of a file for it, or -1 (only used on
  // the CPU); `configuration`: what it is for. Errors: StageRanks::Create's, KeptMemory's;
  // ResourceExhausted if there is not as much memory.
  absl::Status Reserve(const PageCounts& kv_pages, int memory, std::string_view configuration,
                       StageRanks::Events events);
  // The identity of the memory that the cache lies in, kept or this process's own; once reserved.
  MemoryIdentity& memory() { return memory_ ? memory_->identity() : own_memory_; }
  const ModelConfig& config() const { return config_; }
  // Null until reserved.
  StageRanks* ranks() { return ranks_.get(); }

 private:
  WorkerStage(const control::Configure& configuration, const RankGpus& gpus);
  absl::Status LoadRanks(const control::Configure& configuration, const Checkpoint& checkpoint,
                         const RankOptions& options, const std::function<void(double)>& progress);
  absl::StatusOr<uint64_t> AvailableBytes() const;
  absl::Status CheckRoom(const PageCounts& kv_pages, int memory) const;

  const bool on_gpus_;
  const int degree_;
  const RankGpus gpus_;
  const int64_t replay_log_bytes_;
  StageRanks::Options options_;  // constant, but for the number of pages
  uint64_t weight_bytes_ = 0;
  int64_t kv_heads_ = 0;   // of all ranks
  PageCounts page_bytes_;  // of all ranks
  std::string backend_;    // its description
  ModelConfig config_;
  std::unique_ptr<KeptMemory> memory_;
  MemoryIdentity own_memory_;
  std::vector<StageRanks::Rank> loaded_;  // until ranks_ has them
  std::unique_ptr<StageRanks> ranks_;
};

}  // namespace treadle
