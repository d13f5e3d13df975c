#include "server/cli/rank_devices.h"

#include <algorithm>
#include <utility>

#include "base/memory.h"
#include "base/status.h"
#include "engine/remote/worker/worker_stage.h"
#include "kernels/collectives/nccl_communicator.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "models/model.h"

namespace treadle {
namespace {

absl::Status CheckCpu(const ServeOptions& options) {
  if (options.kv_dtype == DType::kBF16) {
    return InvalidArgument("--kv-dtype is bf16, expected f16, f32 or int8 on the CPU");
  }
  if (options.data_plane != DataPlane::kGloo) {
    return InvalidArgument("--data-plane is ", Name(options.data_plane),
                           ", but the stages compute on the CPU; expected gloo, or ",
                           options.workers.empty() ? "GPUs" : "--device cuda");
  }
  return absl::OkStatus();
}

absl::Status CheckGpu(const ServeOptions& options) {
  if (options.kv_dtype == DType::kI8) {
    return InvalidArgument("--kv-dtype is int8, expected f16, bf16 or f32 on a GPU");
  }
  if (options.compute == ComputeMode::kAuto) return absl::OkStatus();
  return InvalidArgument("--compute is ", Name(options.compute),
                         ", expected auto on a GPU, where --dtype says how products are computed");
}

// The first ones that can be opened, as many as are needed.
std::vector<CudaDevice> Opened(const std::vector<CudaDevice>& gpus, int64_t needed,
                               std::string* why) {
  std::vector<CudaDevice> opened;
  for (const CudaDevice& gpu : gpus) {
    if (static_cast<int64_t>(opened.size()) == needed) break;
    const absl::StatusOr<size_t> free = CudaFreeBytes(gpu.ordinal);
    if (free.ok()) opened.push_back(gpu);
    if (!free.ok()) *why = std::string(free.status().message());
  }
  return opened;
}

}  // namespace

absl::StatusOr<RankDevices> RankDevices::Choose(const ServeOptions& options) {
  RankDevices devices(options);
  if (options.tensor_parallel > 1) LoadKernelsEagerly();
  if (!options.workers.empty()) {
    devices.cuda_ = options.device == DeviceChoice::kCuda;
  } else if (options.device != DeviceChoice::kCpu) {
    TREADLE_RETURN_IF_ERROR(devices.FindGpus());
  }
  TREADLE_RETURN_IF_ERROR(devices.cuda() ? CheckGpu(options) : CheckCpu(options));
  return devices;
}

absl::Status RankDevices::FindGpus() {
  std::string why;
  const int64_t needed = options_.stages() * options_.tensor_parallel;
  gpus_ = CudaDevices(&why);
  if (!options_.remote()) gpus_ = Opened(gpus_, needed, &why);
  cuda_ = !gpus_.empty();
  if (!cuda_ && options_.device == DeviceChoice::kCuda) {
    return absl::FailedPreconditionError(Str("--device is cuda, but there is no GPU: ", why));
  }
  const auto found = static_cast<int64_t>(gpus_.size());
  if (!cuda_ || needed <= found) {
    gpus_.resize(static_cast<size_t>(std::min(needed, found)));
    return absl::OkStatus();
  }
  if (options_.stages() == 1) {
    return InvalidArgument("--tensor-parallel is ", needed, ", expected at most ", found,
                           ", the number of GPUs (--device cpu has no such limit)");
  }
  return InvalidArgument("--pipeline-parallel ", options_.stages(), " with --tensor-parallel ",
                         options_.tensor_parallel, " needs ", needed, " GPUs, one for each rank; ",
                         "this machine has ", found, " (--device cpu has no such limit)");
}

RankJoiner RankDevices::Joiner() const { return cuda() ? JoinGpuRanks : RankJoiner(); }

absl::StatusOr<std::vector<std::unique_ptr<Backend>>> RankDevices::Create() const {
  std::vector<std::unique_ptr<Backend>> backends(static_cast<size_t>(options_.tensor_parallel));
  const int threads = ThreadsOfRank(options_, options_.tensor_parallel);
  CpuBackendOptions cpu;
  cpu.threads = threads;
  cpu.pin = options_.pin_threads;
  cpu.compute = options_.compute;
  for (size_t rank = 0; rank < backends.size(); ++rank) {
    if (cuda()) {
      TREADLE_ASSIGN_OR_RETURN(backends[rank],
                               CreateCudaBackend({.device = gpus_[rank].ordinal,
                                                  .dtype = options_.dtype,
                                                  .deterministic = options_.deterministic,
                                                  .pack_threads = threads}));
    } else {
      TREADLE_ASSIGN_OR_RETURN(backends[rank], CreateCpuBackend(cpu));
      cpu.first_cpu += cpu.threads;
    }
  }
  return backends;
}

std::vector<std::string> RankDevices::WorkerFlags(int64_t stage) const {
  if (!cuda()) return {"--device", "cpu"};
  std::string ordinals;
  for (int64_t rank = 0; rank < options_.tensor_parallel; ++rank) {
    const auto index = static_cast<size_t>(stage * options_.tensor_parallel + rank);
    ordinals += Str(ordinals.empty() ? "" : ",", gpus_[index].ordinal);
  }
  return {"--device", "cuda", "--devices", ordinals};
}

std::string_view RankDevices::owner() const {
  if (cuda()) return "GPU";
  return AvailableMemory().limited ? "this process' memory limit (control group)" : "this machine";
}

int64_t RankDevices::AvailableBytes() const {
  if (!cuda()) return static_cast<int64_t>(AvailableMemory().bytes);
  size_t least = SIZE_MAX;
  for (const CudaDevice& gpu : gpus_) {
    const auto free = options_.remote() ? gpu.memory_bytes : CudaFreeBytes(gpu.ordinal);
    least = std::min(least, free.ok() ? *free : 0);
  }
  return static_cast<int64_t>(gpus_.empty() ? 0 : least * gpus_.size());
}

LoadOptions LoadOptionsFrom(const ServeOptions& options, int64_t max_context) {
  LoadOptions load;
  load.shard.size = static_cast<int>(options.tensor_parallel);
  load.max_batch_tokens = options.max_batch_tokens;
  load.max_context = max_context;
  load.weights = options.weights;
  load.outlier_threshold = options.outlier_threshold;
  load.outlier_rule = options.outlier_rule;
  return load;
}

KvMemoryRequest KvMemoryFrom(const ServeOptions& options) {
  KvMemoryRequest memory;
  memory.max_batch_tokens = options.max_batch_tokens;
  memory.max_context = options.max_context;
  memory.page_size = options.page_size;
  memory.kv_dtype = options.kv_dtype;
  memory.tensor_parallel = options.tensor_parallel;
  return memory;
}

LocalEngineOptions LocalEngineFrom(const ServeOptions& options, const PageCounts& kv_pages) {
  LocalEngineOptions engine;
  engine.max_batch_tokens = options.max_batch_tokens;
  engine.page_size = options.page_size;
  engine.kv_pages = kv_pages;
  engine.kv_dtype = options.kv_dtype;
  engine.depth = static_cast<int>(options.engine_depth);
  engine.iteration_deadline = options.iteration_deadline;
  return engine;
}

int ThreadsOfRank(const ServeOptions& options, int64_t parts) {
  const int64_t threads = options.threads > 0 ? options.threads : UsableCpus();
  return static_cast<int>(std::max<int64_t>(1, threads / parts));
}

absl::StatusOr<std::vector<StageRanks::Rank>> LoadRanks(const Checkpoint& checkpoint,
                                                        const ServeOptions& options,
                                                        const RankDevices& devices,
                                                        int64_t max_context,
                                                        std::function<void(double)> progress) {
  TREADLE_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Backend>> backends, devices.Create());
  std::vector<StageRanks::Rank> ranks(backends.size());
  std::vector<Backend*> devices_of_ranks;
  for (size_t i = 0; i < ranks.size(); ++i) {
    ranks[i].backend = std::move(backends[i]);
    devices_of_ranks.push_back(ranks[i].backend.get());
  }
  LoadOptions load = LoadOptionsFrom(options, max_context);
  load.threads = ThreadsOfRank(options, options.tensor_parallel);
  load.progress = std::move(progress);
  TREADLE_ASSIGN_OR_RETURN(auto models, LoadModelRanks(checkpoint, devices_of_ranks, load));
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i].model = std::move(models[i]);
  return ranks;
}

absl::StatusOr<RankGpus> FindWorkerGpus(DeviceChoice device, const std::vector<int>& ordinals) {
  RankGpus found;
  if (device == DeviceChoice::kCpu) {
    found.none = "it was started with --device cpu";
    return found;
  }
  LoadKernelsEagerly();  // it may get several ranks, or neighbours
  const std::vector<CudaDevice> all = CudaDevices(&found.none);
  if (all.empty() && device == DeviceChoice::kCuda) {
    return absl::FailedPreconditionError(
        Str("--device is cuda, but there is no GPU: ", found.none));
  }
  std::vector<int> of_rank;
  for (const CudaDevice& gpu : all) of_rank.push_back(gpu.ordinal);
  if (!ordinals.empty()) of_rank = ordinals;
  for (size_t rank = 0; rank < of_rank.size(); ++rank) {
    const auto gpu = std::ranges::find(all, of_rank[rank], &CudaDevice::ordinal);
    if (gpu == all.end() || std::count(of_rank.begin(), of_rank.end(), of_rank[rank]) > 1) {
      return InvalidArgument("--devices has ", of_rank[rank],
                             gpu == all.end() ? ", which this machine does not have; it has "
                                              : " twice, expected different ones of the ",
                             all.size(), all.size() == 1 ? " GPU" : " GPUs");
    }
    found.gpus.push_back({.id = gpu->bus_id, .memory_bytes = gpu->memory_bytes});
  }
  found.create = [of_rank](int rank, DType dtype, bool deterministic, int threads) {
    return CreateCudaBackend({.device = of_rank[rank],
                              .dtype = dtype,
                              .deterministic = deterministic,
                              .pack_threads = threads});
  };
  found.free_bytes = [of_rank](int rank) -> absl::StatusOr<uint64_t> {
    return CudaFreeBytes(of_rank[rank]);
  };
  found.join = JoinGpuRanks;
  found.link = JoinGpuLink;
  found.can_link = CanJoinGpus;
  return found;
}

}  // namespace treadle
