#include "kernels/collectives/gpu_ranks.h"

#include <algorithm>

#include "kernels/collectives/nccl_communicator.h"
#include "kernels/collectives/nccl_library.h"
#include "kernels/cuda/runtime/backend_on_device.h"

namespace treadle {

absl::Status CanJoinGpus() { return OpenNccl(); }

absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuLink(Backend& backend, int rank,
                                                          Rendezvous& rendezvous,
                                                          std::chrono::milliseconds timeout) {
  TREADLE_RETURN_IF_ERROR(OpenNccl());
  NcclOptions options{
      .rank = rank, .size = 2, .collectives = false, .sends_up = true, .timeout = timeout};
  options.connect_timeout = std::min(timeout, options.connect_timeout);
  return CreateNcclCommunicator(options, cuda::DeviceOf(backend), rendezvous);
}

absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuRanks(Backend& backend, int rank, int size,
                                                           Rendezvous& rendezvous,
                                                           std::chrono::milliseconds timeout) {
  TREADLE_RETURN_IF_ERROR(OpenNccl());
  return CreateNcclCommunicator({.rank = rank, .size = size, .timeout = timeout},
                                cuda::DeviceOf(backend), rendezvous);
}

}  // namespace treadle
