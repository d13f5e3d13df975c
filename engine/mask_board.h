// The masks of an epoch's outputs, between the thread that works them out and the ranks that
// sample: they may come before their plan, while it runs, and in parts.
//
// Thread safety: any thread. Every rank takes each plan with masked outputs once, in order.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "engine/plan/iteration_plan.h"

namespace treadle {

class MaskBoard {
 public:
  // By index of the step and of its output.
  using ByOutput = std::map<std::pair<int32_t, int32_t>, std::vector<uint32_t>>;
  using Masks = std::shared_ptr<const ByOutput>;

  // Masks that no rank has taken yet, together. A plan of 256 sequences and a vocabulary of 256 Ki
  // tokens have 8 MiB.
  static constexpr size_t kMaxBytes = size_t{256} << 20;

  struct Options {
    int64_t vocab = 0;
    int ranks = 1;
    std::chrono::milliseconds timeout;  // of Take
  };
  explicit MaskBoard(const Options& options) : options_(options) {}

  // InvalidArgument: a mask of another length, one that is there already, or that comes too late;
  // ResourceExhausted beyond kMaxBytes.
  absl::Status Put(uint64_t iteration, std::vector<OutputMask> masks) ABSL_LOCKS_EXCLUDED(mutex_);

  // The masks of the plan's masked outputs, of which it has some, once they are there.
  // DeadlineExceeded says how many were; InvalidArgument: there is one of an output that is not
  // masked; Abort's reason.
  absl::StatusOr<Masks> Take(const IterationPlan& plan) ABSL_LOCKS_EXCLUDED(mutex_);

  // Wakes who waits; the first reason stays.
  void Abort(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Iteration {
    std::shared_ptr<ByOutput> masks = std::make_shared<ByOutput>();
    int taken = 0;  // by so many ranks
  };

  size_t BytesOf(const Iteration& iteration) const {
    return iteration.masks->size() * MaskWords(options_.vocab) * sizeof(uint32_t);
  }

  const Options options_;
  Mutex mutex_;
  CondVar changed_;
  std::map<uint64_t, Iteration> waiting_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;   // of waiting_
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;  // no earlier iteration is taken any more
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace treadle
