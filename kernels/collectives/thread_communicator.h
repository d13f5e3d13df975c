// Communicators between threads of one process, for collectives, over their common memory.
//
// A collective is one rendezvous: each rank publishes its buffer, waits for the others, and reads
// theirs in place, so a byte is copied once at most. Waits look and yield for some microseconds
// (ranks that have a core each are in step), then sleep. A fault of one rank's communicator breaks
// the group's.
//
// Thread safety: as Communicator; the group lives as long as the last of them.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "kernels/collectives/communicator.h"

namespace treadle {

// One per rank, in rank order. size >= 1; every wait ends after `timeout`.
std::vector<std::unique_ptr<Communicator>> CreateThreadCommunicators(
    int size, std::chrono::milliseconds timeout);

}  // namespace treadle
