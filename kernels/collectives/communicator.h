// How ranks exchange tensors: the data plane.
//
// A communicator joins ranks 0 .. size() - 1, one object per rank. All ranks call the same
// collectives in the same order; sends and receives match by order per pair of ranks (there are no
// tags), with equal byte counts on both ends. Tensor parallelism and the pipeline have a
// communicator each, and every epoch makes new ones. The ranks of a stage need collectives, a link
// between stages needs transfers: what a transport is not made for is Unimplemented.
//
// Errors: every wait is bounded by the timeout that the communicator was made with. A timeout, a
// lost peer or Abort breaks it for good: this and all later calls return that first status, on this
// rank at once and on the others at the latest when their own wait ends. Nothing can be said of the
// contents of buffers then, but they must stay alive until the communicator is gone.
//
// Numerics: a reduction is one sum in ascending rank order, so the same inputs give the same bits
// on every rank and in every run (docs/design.md, N3).
//
// Thread safety: all methods belong to the rank's thread, but for Abort, rank and size.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace treadle {

class Backend;
class Rendezvous;

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Whether buffers are a device's, and collectives are issued to it in the order of its other work
  // (and can be captured, Backend::RunGraph): they return at once, and what becomes of them shows
  // in the device's waits. If not, buffers are the host's, and collectives are done on return.
  // Constant.
  virtual bool asynchronous() const = 0;

  // out = in of rank 0 + in of rank 1 + ..., added to out as it is if `accumulate` (the residual
  // add, fused: out + (the sum)). [count] f32 each; in and out must not overlap. The contents of
  // `in` must stay until this rank's next call of a collective returns.
  virtual absl::Status AllReduce(const float* in, int64_t count, bool accumulate, float* out) {
    return Lacks("collectives");
  }
  // out: [size][bytes]; part r is `in` of rank r. `in` may be reused on return (unlike
  // AllReduce's: every rank has read it by then).
  virtual absl::Status AllGather(const void* in, size_t bytes, void* out) {
    return Lacks("collectives");
  }
  // `data` of rank `root` to all others' `data`. Returns on each rank when its own part is done and
  // its buffer may be reused.
  virtual absl::Status Broadcast(void* data, size_t bytes, int root) {
    return Lacks("collectives");
  }

  // Begins a transfer to or from another rank; Wait completes it. `data` must be left alone from
  // here until then. Transfers may complete in any order, and be waited for in any order.
  using Transfer = uint64_t;
  virtual absl::StatusOr<Transfer> Send(const void* data, size_t bytes, int to) {
    return Lacks("transfers");
  }
  virtual absl::StatusOr<Transfer> Recv(void* data, size_t bytes, int from) {
    return Lacks("transfers");
  }
  virtual absl::Status Wait(Transfer transfer) { return Lacks("transfers"); }

  // Breaks the communicator on this rank and wakes whoever waits in it. From any thread, any number
  // of times; the first reason stays.
  virtual void Abort(absl::Status why) = 0;

 private:
  static absl::Status Lacks(const char* what) {
    return absl::UnimplementedError(std::string("this transport has no ") + what);
  }
};

// A rank's part in joining others for one epoch: those of its stage, or its neighbour
// in another.
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
