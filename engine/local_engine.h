// The engine inside this process: one stage with all layers, on one thread per tensor-parallel
// rank.
//
// The ranks run the submitted plans in order. A plan is in flight from Submit until its
// result was taken, so HasRoom changes only through what the loop itself does (and when an epoch
// ends): what a policy sees at a given iteration does not depend on timing.
//
// The epoch ends with
//   InvalidArgument, NotFound   a plan of another epoch, out of order, or one that cannot be
//   applied
//                               (SequenceTable::Check names what is wrong; nothing was touched);
//   DeadlineExceeded            an iteration ran longer than iteration_deadline.
// There is no watchdog thread: lateness is noticed by the next call of status, HasRoom or
// TakeResults (the serving loop's heartbeat sees to it that there is one), and at the latest when
// the iteration returns. After Restart the next epoch stands as soon as the ranks are out of
// their old iteration, whose result is dropped. The destructor waits for the iteration that runs,
// and drops queued plans.
//
// Thread safety: as Engine. Backends and models go over to the ranks' threads at Start.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/stage_ranks.h"

namespace treadle {

struct LocalEngineOptions {
  int64_t max_batch_tokens = 512;  // as the model was loaded with
  int64_t page_size = 32;
  int64_t kv_pages = 0;
  DType kv_dtype = DType::kF16;
  // Plans in flight: 2 lets a sequence's next step use the previous sample without waiting for the
  // host (docs/design.md, Algorithm 1).
  int depth = 2;
  std::chrono::milliseconds iteration_deadline{120'000};
  RankJoiner join = {};  // as StageRanks::Options
};

class LocalEngine {
 public:
  // ranks: as StageRanks::Create; their models hold all layers. InvalidArgument names an option
  // that is out of range; ResourceExhausted if the device has not the memory.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(std::vector<StageRanks::Rank> ranks,
                                                        const LocalEngineOptions& options);
  // On one rank.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(std::unique_ptr<Backend> backend,
                                                        std::unique_ptr<Model> model,
                                                        const LocalEngineOptions& options);
};

}  // namespace treadle
