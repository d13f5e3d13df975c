// How the ranks of a stage are joined to the neighbouring stages for one epoch.
//
// Thread safety: JoinNeighbours on each rank's thread, at the same time as on the others'.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/activation_link.h"
#include "engine/rank_join.h"

namespace treadle {

// The default: a single stage.
struct StagePipeline {
  int stage = 0;
  int stages = 1;
  WireType wire = WireType::kF32;
  // Activations go through the hosts: rank 0's communicator, in which stage s is rank s.
  std::unique_ptr<Communicator> communicator;
  // Or they stay on devices: `link` joins rank r of a stage (as rank 0, which sends) and rank r of
  // the next (as rank 1, which receives). Every stage makes the way to the previous stage first, so
  // that they come about one after the other, from the first stage on.
  RankJoiner link;
  std::shared_ptr<Rendezvous> rendezvous;  // of all ranks of all stages
  std::chrono::milliseconds timeout{0};    // of every wait, and of joining
};

// The link of one rank; null if it has none. `communicator` is the pipeline's, on rank 0. Errors:
// the joiner's, ActivationLink's.
absl::StatusOr<std::unique_ptr<ActivationLink>> JoinNeighbours(
    const StagePipeline& pipeline, std::unique_ptr<Communicator> communicator, int rank,
    Backend& backend, int64_t hidden, int64_t max_batch_tokens);

}  // namespace treadle
