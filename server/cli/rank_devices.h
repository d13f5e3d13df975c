// Devices of ranks: the CPU, or a GPU each (--device). Ranks of this process, which load here; of
// worker processes that it starts on this machine; or of workers elsewhere.
//
// Thread safety: call from one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/local_engine.h"
#include "engine/memory_plan.h"
#include "engine/remote/worker/worker_stage.h"
#include "engine/stage_ranks.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "models/checkpoints/checkpoint.h"
#include "models/model.h"
#include "server/configuration.h"

namespace treadle {

class RankDevices {
 public:
  // `auto` takes GPUs where this machine has any; workers elsewhere (--workers) then run on their
  // CPUs. Only GPUs of ranks of this process are opened. Errors: no GPU, or fewer than ranks, and
  // why; options that the device does not have.
  static absl::StatusOr<RankDevices> Choose(const ServeOptions& options);

  bool cuda() const { return cuda_; }
  // The memory's owner, for errors: "GPU", "this machine", or a limit of this process.
  std::string_view owner() const;
  // This process's backends: one per rank, in order. CPUs are shared out over them, GPUs are one
  // each.
  absl::StatusOr<std::vector<std::unique_ptr<Backend>>> Create() const;
  // How those ranks are joined (StageRanks::Options).
  RankJoiner Joiner() const;
  // Flags for the worker process of a stage: its GPUs, by number, or none.
  std::vector<std::string> WorkerFlags(int64_t stage) const;
  // Bytes that all ranks of this machine together can have: now, on GPUs as many times the fullest
  // one's; on GPUs of other processes, all that they have.
  int64_t AvailableBytes() const;
  // How much of that a K/V cache may take if nobody says: a machine has other uses, a GPU has not.
  double CacheShare() const { return cuda() ? 0.9 : 0.5; }

 private:
  explicit RankDevices(const ServeOptions& options) : options_(options) {}
  absl::Status FindGpus();

  ServeOptions options_;
  bool cuda_ = false;
  std::vector<CudaDevice> gpus_;  // of all ranks on this machine, stage by stage; none: CPU
};

// Makes the ranks' backends and loads their shards at the same time. `progress`: fraction of all,
// from several threads but one at a time; may be empty. Errors: RankDevices::Create's and
// Model::Load's.
absl::StatusOr<std::vector<StageRanks::Rank>> LoadRanks(const Checkpoint& checkpoint,
                                                        const ServeOptions& options,
                                                        const RankDevices& devices,
                                                        int64_t max_context,
                                                        std::function<void(double)> progress);

// How `options` say that a model is loaded; shard 0 of all ranks.
LoadOptions LoadOptionsFrom(const ServeOptions& options, int64_t max_context);
// How they size K/V pages, whatever memory there is, and the engine of ranks that load here.
KvMemoryRequest KvMemoryFrom(const ServeOptions& options);
LocalEngineOptions LocalEngineFrom(const ServeOptions& options, const PageCounts& kv_pages);

// Threads of one rank when `parts` ranks, over all stages, share the threads of `options`.
int ThreadsOfRank(const ServeOptions& options, int64_t parts);

// The GPUs of a worker by its flags: `ordinals` are those of its ranks, in order (none: all that
// there are). None is opened. Errors: there is none and `device` is cuda, or one is missing or
// named twice.
absl::StatusOr<RankGpus> FindWorkerGpus(DeviceChoice device, const std::vector<int>& ordinals);

}  // namespace treadle
