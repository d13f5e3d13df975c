#include "kernels/collectives/gpu_ranks.h"

#include "kernels/collectives/nccl_communicator.h"
#include "kernels/collectives/nccl_library.h"
#include "kernels/cuda/backend_on_device.h"

namespace treadle {

absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuRanks(Backend& backend, int rank, int size,
                                                           Rendezvous& rendezvous,
                                                           std::chrono::milliseconds timeout) {
  TREADLE_RETURN_IF_ERROR(OpenNccl());
  return CreateNcclCommunicator({.rank = rank, .size = size, .timeout = timeout},
                                cuda::DeviceOf(backend), rendezvous);
}

}  // namespace treadle
