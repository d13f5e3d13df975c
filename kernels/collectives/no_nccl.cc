// Stands in for NCCL in builds without it.
#include "kernels/collectives/nccl_communicator.h"

namespace treadle {
namespace {

absl::Status NoNccl() {
  return absl::FailedPreconditionError(
      "this build has no NCCL: CUDA or nccl.h was not there when it was configured");
}

}  // namespace

void LoadKernelsEagerly() {}

absl::Status CanJoinGpus() { return NoNccl(); }

absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuLink(Backend&, int, Rendezvous&,
                                                          std::chrono::milliseconds) {
  return NoNccl();
}

absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuRanks(Backend&, int, int, Rendezvous&,
                                                           std::chrono::milliseconds) {
  return NoNccl();
}

}  // namespace treadle
