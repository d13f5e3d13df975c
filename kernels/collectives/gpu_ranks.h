// Joins ranks that have a GPU each. Thread safety: stateless.
#pragma once

#include <chrono>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {

// Whether the two functions below can work here. FailedPrecondition: NCCL is not installed, or this
// build has none.
absl::Status CanJoinGpus();

// The ranks of one process, for collectives: as CreateNcclCommunicator, on the device of a CUDA
// backend. Errors: CanJoinGpus' too.
absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuRanks(Backend& backend, int rank, int size,
                                                           Rendezvous& rendezvous,
                                                           std::chrono::milliseconds timeout);

// Two ranks of any processes, of which rank 0 sends and rank 1 receives. Otherwise as above.
absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuLink(Backend& backend, int rank,
                                                          Rendezvous& rendezvous,
                                                          std::chrono::milliseconds timeout);

}  // namespace treadle
