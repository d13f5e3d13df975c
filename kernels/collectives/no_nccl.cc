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

absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuLink(const RankJoin&) { return NoNccl(); }

absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuRanks(const RankJoin&) { return NoNccl(); }

}  // namespace treadle
