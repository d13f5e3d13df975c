// A communicator between GPUs, over NCCL: for collectives, or a link for transfers.
//
// Buffers are device addresses (or page-locked host memory). Where Communicator says that a buffer
// may be reused on return, it means: by what is issued to the device's stream afterwards.
//
// Collectives are issued to the device's stream and return at once; between BeginCapture and
// EndCapture they become part of the graph. The host's next wait for the device (Device::
// Synchronize, WaitForMark) notices what became of them: it ends with this communicator's error at
// the timeout, when a peer is lost, or at Abort. AllReduce is an AllGather and a sum in rank order:
// NCCL's own reductions depend on an element's place in the buffer, hence on the batch.
//
// A link's transfers go from lower ranks to higher ones, on a stream of their own beside the
// device's: a Send begins when what was issued before it is done, a Recv when it is waited for
// (posted early, it would hold up what is sent after it). They run one after the other, so ranks
// must begin them in an order that all of them share. Wait blocks the host, and no stream: the
// device's other work never waits for a transfer. So a transfer that breaks is no failure of the
// device, and a later communicator can be made on it.
//
// Several communicators of a device (the ranks' of a stage, and those of its links to other stages)
// are used by one thread. NCCL's kernels occupy a device while they wait for a peer, and may keep
// each other from starting: whoever uses several must issue them in an order that all devices share
// (NCCL's user guide, "Using multiple NCCL communicators concurrently"). Stages of a pipeline do:
// by iteration, and within one by stage. Each issues the receive of an iteration, the collectives,
// the send; the receive only when it is waited for, which is after the iteration before it.
//
// The threads of one process that have a communicator each must not capture, replay and communicate
// in different orders: what a rank issues, all issue, in the same order. Graphs that captured a
// collective must be destroyed before the communicator. One rank per GPU.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {

namespace cuda {
class Device;
}

struct NcclOptions {
  int rank = 0;
  int size = 1;
  bool link = false;  // Send and Recv instead of collectives
  // AllReduce takes pieces of at most this many f32; `size` times as many are allocated.
  int64_t max_count = 1 << 20;
  std::chrono::milliseconds timeout{120'000};         // of every wait
  std::chrono::milliseconds connect_timeout{60'000};  // until all ranks are there and connected
};

// To be called before the process' first use of CUDA where it has several ranks: makes the driver
// load all kernels at the start, unless CUDA_MODULE_LOADING says otherwise. A kernel that is first
// loaded while a collective waits for its peers can wait for that collective.
void LoadKernelsEagerly();

// Joins `size` ranks, each of which calls this on its own thread with its own rank and device, and
// the same, fresh rendezvous, whose status ends every wait in here. Everything is connected and has
// run once on return. The device outlives the communicator. Errors: FailedPrecondition (a build
// without NCCL), DeadlineExceeded (a rank did not come), NCCL's, the rendezvous' and the device's
// own.
absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclCommunicator(const NcclOptions& options,
                                                                     cuda::Device& device,
                                                                     Rendezvous& rendezvous);

// Whether the two functions below can work here. FailedPrecondition: NCCL is not installed, or this
// build has none.
absl::Status CanJoinGpus();

// The ranks of one process, for collectives: as CreateNcclCommunicator, on the device of a CUDA
// backend. Errors: CanJoinGpus' too.
absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuRanks(const RankJoin& join);

// Two ranks of any processes, of which rank 0 sends and rank 1 receives. Otherwise as above.
absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuLink(const RankJoin& join);

}  // namespace treadle
