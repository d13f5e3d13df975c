#include "server/cli/rank_devices.h"

#include <algorithm>

#include "engine/remote/machine.h"
#include "kernels/collectives/gpu_ranks.h"
#include "kernels/collectives/nccl_communicator.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/status.h"
#include "server/cli/load_ranks.h"

namespace treadle {
namespace {

absl::Status CheckCpu(const ServeOptions& options) {
  if (options.kv_dtype == "bf16") {
    return InvalidArgument("--kv-dtype is bf16, expected f16 or f32 on the CPU");
  }
  return absl::OkStatus();
}

absl::Status CheckGpu(const ServeOptions& options) {
  if (options.compute != "auto") {
    return InvalidArgument(
        "--compute is ", options.compute,
        ", expected auto on a GPU, where --dtype says how products are computed");
  }
  if (options.remote()) {
    return InvalidArgument(
        "--device cuda with worker processes: workers run on the CPU; expected "
        "--pipeline-parallel 1 and no --workers");
  }
  return absl::OkStatus();
}

DType ProductType(const ServeOptions& options) {
  if (options.dtype == "fp32") return DType::kF32;
  return options.dtype == "fp16" ? DType::kF16 : DType::kBF16;
}

}  // namespace

absl::StatusOr<RankDevices> RankDevices::Choose(const ServeOptions& options) {
  RankDevices devices(options);
  std::string why;
  if (options.tensor_parallel > 1) LoadKernelsEagerly();
  if (options.device != "cpu" && !(options.device == "auto" && options.remote())) {
    devices.gpus_ = CudaDevices(&why);
  }
  if (!devices.cuda()) {
    if (options.device == "cuda") {
      return absl::FailedPreconditionError(Str("--device is cuda, but there is no GPU: ", why));
    }
    TREADLE_RETURN_IF_ERROR(CheckCpu(options));
    return devices;
  }
  TREADLE_RETURN_IF_ERROR(CheckGpu(options));
  if (options.tensor_parallel > static_cast<int64_t>(devices.gpus_.size())) {
    return InvalidArgument("--tensor-parallel is ", options.tensor_parallel, ", expected at most ",
                           devices.gpus_.size(),
                           ", the number of GPUs (--device cpu has no such limit)");
  }
  devices.gpus_.resize(static_cast<size_t>(options.tensor_parallel));
  return devices;
}

RankJoiner RankDevices::Joiner() const {
  if (!cuda()) return {};
  return [](const RankJoin& join) {
    return JoinGpuRanks(join.backend, join.rank, join.size, join.rendezvous, join.timeout);
  };
}

absl::StatusOr<std::vector<std::unique_ptr<Backend>>> RankDevices::Create() const {
  std::vector<std::unique_ptr<Backend>> backends(static_cast<size_t>(options_.tensor_parallel));
  const int threads = ThreadsOfRank(options_, options_.tensor_parallel);
  CpuBackendOptions cpu;
  cpu.threads = threads;
  cpu.pin = options_.pin_threads;
  cpu.compute = ComputeFrom(options_.compute);
  for (size_t rank = 0; rank < backends.size(); ++rank) {
    if (cuda()) {
      TREADLE_ASSIGN_OR_RETURN(backends[rank],
                               CreateCudaBackend({.device = gpus_[rank].ordinal,
                                                  .dtype = ProductType(options_),
                                                  .deterministic = options_.deterministic,
                                                  .pack_threads = threads}));
    } else {
      TREADLE_ASSIGN_OR_RETURN(backends[rank], CreateCpuBackend(cpu));
      cpu.first_cpu += cpu.threads;
    }
  }
  return backends;
}

int64_t RankDevices::AvailableBytes() const {
  if (!cuda()) return static_cast<int64_t>(AvailableMemory());
  std::string why;
  const std::vector<CudaDevice> now = CudaDevices(&why);
  size_t least = SIZE_MAX;
  for (const CudaDevice& ours : gpus_) {
    for (const CudaDevice& gpu : now) {
      if (gpu.ordinal == ours.ordinal) least = std::min(least, gpu.free_bytes);
    }
  }
  return least == SIZE_MAX ? 0 : static_cast<int64_t>(least * gpus_.size());
}

}  // namespace treadle
