// The ranks of one stage in this process: one thread, backend, model and Stage each. They run the
// same plans in the same order and meet in the tensor-parallel communicator.
//
// LocalEngine and Worker are made of it: the first has one stage with all layers, the second one of
// several. It knows epochs, but neither deadlines of iterations nor who sent a plan.
//
// Thread safety: Start, BeginEpoch, EndEpoch and Submit from one thread at a time; the events are
// called on a rank's thread (a gap in the iterations: on Submit's) and must neither block nor call
// back. The destructor ends the epoch and waits for the iteration that runs.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/activation_link.h"
#include "engine/iteration_plan.h"
#include "engine/kv_cache.h"
#include "engine/trace_events.h"
#include "kernels/backend.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"
#include "models/model.h"

namespace treadle {

// What a rank needs to be joined with the others of its stage.
struct RankJoin {
  Backend& backend;
  int rank = 0;
  int size = 1;
  Rendezvous& rendezvous;  // of these ranks, for one epoch
  std::chrono::milliseconds timeout;
};
// Makes a rank's communicator; called on the rank's thread, by all ranks at once.
using RankJoiner = std::function<absl::StatusOr<std::unique_ptr<Communicator>>(const RankJoin&)>;

class StageRanks {
 public:
  struct Rank {
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;
  };
  struct Options {
    int64_t max_batch_tokens = 512;
    KvCache::Options kv;
    int stage = 0;                               // for trace events
    std::chrono::milliseconds timeout{120'000};  // of every wait between ranks
    RankJoiner join = {};  // empty: through this process' memory, for ranks on the CPU
  };

  // ranks: one per tensor-parallel rank, in order; models loaded for the same layers, shard i of
  // ranks.size(). Errors: an option out of range, memory.
  static absl::StatusOr<std::unique_ptr<StageRanks>> Create(std::vector<Rank> ranks,
                                                            const Options& options);
  virtual ~StageRanks() = default;

  // What the threads report. `done`: a plan of the standing epoch ran (with results of steps on the
  // last stage only) or the epoch failed, after which nothing more of it is reported. `ready`: the
  // epoch stands (every rank has dropped its sequences).
  struct Events {
    std::function<void(uint64_t epoch, absl::StatusOr<IterationResult>)> done;
    std::function<void(uint64_t epoch)> ready;
  };
  // Once, before anything else. ResourceExhausted if there are no threads to be had.
  virtual absl::Status Start(Events events) = 0;

  // How a stage of several is joined to its neighbours for one epoch; the default: a single stage.
  struct Pipeline {
    std::unique_ptr<Communicator> communicator;  // rank 0's
    int previous = -1;                           // as ActivationLink::Options
    int next = -1;
    WireType wire = WireType::kF32;
  };
  // Ends the current epoch, if any, and begins another: sequences are dropped, communicators and
  // link made anew. Returns at once; `ready` says when it stands, `done` why it cannot.
  virtual void BeginEpoch(uint64_t epoch, Pipeline pipeline) = 0;
  // Breaks the communicators with `why` and drops what is queued; nothing more of the epoch is
  // reported. Idempotent.
  virtual void EndEpoch(absl::Status why) = 0;
  // Queues a plan. Plans of other epochs are dropped; iterations must be consecutive from 0, a gap
  // is a failure of the epoch.
  virtual void Submit(IterationPlan plan) = 0;

  // Any thread.
  virtual void SetTracing(bool on) = 0;
  virtual std::vector<TraceEvent> TakeTrace() = 0;
};

}  // namespace treadle
