// Guesses of a smaller model with the same vocabulary (Leviathan et al. 2023, speculative
// decoding): it runs ahead of the served one, one token a step, for all sequences that guess
// together.
//
// It samples as the request does, with the same random number at each position, so where the two
// models agree on a position's distribution they agree on its token. It has an engine and K/V pages
// of its own. A sequence's are reserved at its first guess, for all tokens that it may have, as the
// served model's are at admission; without room, or beyond the model's context, the sequence's own
// repetitions are all that is guessed (ngram_drafter.h).
//
// Probabilities are learnt by the model's own confidence in its token: each token that comes shows
// whether the guess for it was right, whether anybody tried it or not. A sequence for which the
// model is not worth its time does without from then on, for it would have to run first what it
// missed; the next ones begin with what was learnt so far.
//
// If its engine fails, nothing more is guessed by it, and requests go on without.
//
// Thread safety: confined to the serving loop's thread; Draft waits for the model's iterations.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync.h"
#include "engine/engine.h"
#include "engine/kv/kv_slot_manager.h"
#include "scheduler/cost/iteration_cost.h"
#include "scheduler/request/drafter.h"
#include "scheduler/request/request.h"

namespace treadle {

class DraftModel {
 public:
  struct Options {
    PageCounts pages;
    KvPaging paging;
    int64_t context = 0;           // positions that the model can run
    int64_t max_batch_tokens = 0;  // as its engine has
    // Told once why nothing more is guessed; must not block.
    std::function<void(const absl::Status&)> on_failure = {};
  };

  // `engine`: of one stage, not started; its depth is how many steps run without the host between.
  DraftModel(std::unique_ptr<Engine> engine, const Options& options);
  ~DraftModel();

  // Once, before anything else: starts the engine, and measures what its iterations cost. The
  // engine's errors.
  absl::Status Start();

  // A drafter of the sequence, with the tokens that it has. The model outlives it.
  std::unique_ptr<Drafter> Make(const Request& request, const Sequence& sequence);

  struct Wanted {
    Drafter* drafter = nullptr;  // that Make made
    int32_t count = 0;           // of tokens after those that it knows
  };
  // Has them guess. One that has fallen behind by more than an iteration runs a part of it, and
  // guesses another time.
  void Draft(std::span<const Wanted> wanted);

  const IterationCost& cost() const { return cost_; }
  KvCapacity capacity() const { return kv_.Capacity(); }

 private:
  class ModelDrafter;
  using Guessing = std::vector<std::vector<ModelDrafter*>>;

  absl::Status Measure();
  void NoteCost(const IterationWork& work, const IterationResult& result);
  bool Admit(ModelDrafter& drafter, IterationPlan& plan);
  void Release(ModelDrafter& drafter);
  std::vector<IterationPlan> Plan(std::span<const Wanted> wanted, Guessing& guessing);
  absl::StatusOr<std::vector<IterationResult>> Run(std::vector<IterationPlan> plans);
  void WaitForNews() ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  const std::unique_ptr<Engine> engine_;
  KvSlotManager kv_;
  IterationCost cost_;
  std::vector<SequenceId> releases_;  // for the next plan
  SequenceId next_sequence_ = 1;
  uint64_t next_iteration_ = 0;
  bool failed_ = false;
  // Shares of right guesses: of all, with which a sequence begins, and by the model's confidence.
  double promise_ = 0.6;
  std::array<double, 5> right_ = {0.15, 0.45, 0.7, 0.87, 0.97};

  Mutex mutex_;
  CondVar news_;
  bool rung_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace treadle
