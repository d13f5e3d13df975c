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
#include "engine/iteration_plan.h"
#include "engine/kv_cache.h"
#include "engine/rank_join.h"
#include "engine/stage_pipeline.h"
#include "engine/trace_events.h"
#include "kernels/backend.h"
#include "models/model.h"

namespace treadle {

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
    // How ranks of this stage are joined; empty: through this process' memory, on the CPU.
    RankJoiner join = {};
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

  // Ends the current epoch, if any, and begins another: sequences are dropped, communicators and
  // links made anew. Returns at once; `ready` says when it stands, `done` why it cannot.
  virtual void BeginEpoch(uint64_t epoch, StagePipeline pipeline) = 0;
  // Breaks the communicators with `why` and drops what is queued; nothing more of the epoch is
  // reported. Ranks that are being joined to neighbours stop when the pipeline's rendezvous is
  // over, which is its owner's part. Idempotent.
  virtual void EndEpoch(absl::Status why) = 0;
  // Queues a plan. Plans of other epochs are dropped; iterations must be consecutive from 0, a gap
  // is a failure of the epoch.
  virtual void Submit(IterationPlan plan) = 0;

  // Any thread.
  virtual void SetTracing(bool on) = 0;
  virtual std::vector<TraceEvent> TakeTrace() = 0;
};

}  // namespace treadle
