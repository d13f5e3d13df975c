// How a rank is joined with others: those of its stage, or one of a neighbouring stage. Thread
// safety: a joiner may be called from any thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {

struct RankJoin {
  Backend& backend;
  int rank = 0;
  int size = 1;
  Rendezvous& rendezvous;  // of these ranks, for one epoch; its status ends what waits
  std::chrono::milliseconds timeout;
};

// Makes a rank's communicator; called on the rank's thread, by all of them at once.
using RankJoiner = std::function<absl::StatusOr<std::unique_ptr<Communicator>>(const RankJoin&)>;

}  // namespace treadle
