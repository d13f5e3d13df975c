// Joins the ranks of one process that have a GPU each. Thread safety: stateless.
#pragma once

#include <chrono>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {

// As CreateNcclCommunicator, on the device of a CUDA backend. FailedPrecondition where NCCL is not
// installed, or this build has none.
absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuRanks(Backend& backend, int rank, int size,
                                                           Rendezvous& rendezvous,
                                                           std::chrono::milliseconds timeout);

}  // namespace treadle
