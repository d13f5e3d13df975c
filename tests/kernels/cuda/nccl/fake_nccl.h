// NCCL and the few calls of the CUDA runtime that kernels/collectives/nccl_*.cc make, between
// threads of this process: for its order of calls, waits and ends. The library's behaviour at its
// worst: nothing is buffered, so a send runs only while its receive does, and what is issued on one
// stream runs strictly one after the other.
//
// The emulated device's own stream is known by Device::stream. Events on it pass in the order of
// the device's work, which also goes on while the host asks for an event that waits for it.
// Collectives on it run at once, or, where the device captures or defers its work, in its turn:
// the device's thread then waits for the others' devices, however long. With treadle_fake_nccl,
// kernels/collectives/nccl_communicator.h is to be had on emulated GPUs.
#pragma once

#include <atomic>

namespace treadle {

struct FakeNccl {
  // Mistakes in the use of the library: it would have been undefined there.
  static std::atomic<int> misuses;
  // Communicators that were made and neither destroyed nor aborted; ends of both kinds.
  static std::atomic<int> living;
  static std::atomic<int> destroyed;
  static std::atomic<int> aborted;
  // The next asynchronous state of every communicator of this rank, if not negative: a lost peer.
  static std::atomic<int> failing_rank;
  static void Reset();
};

}  // namespace treadle
