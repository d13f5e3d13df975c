// One candidate of a request under its constraint: works out what its next token may be.
//
// min_new_tokens: as long as fewer tokens were produced, end tokens are masked too, unless nothing
// else is left: then the constraint ends the answer. A candidate whose constraint allows no token
// or takes too long is told everything is allowed, and Stuck says so.
//
// Thread safety: the serving loop's thread, but for what the mask thread works out.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "base/sync.h"
#include "engine/plan/iteration_plan.h"
#include "scheduler/request/drafter.h"
#include "scheduler/request/token_constraint.h"

namespace treadle {

class MaskThread;
struct RequestSpec;

class MaskedCandidate {
 public:
  // `produced`: the tokens that it has.
  MaskedCandidate(const RequestSpec& spec, std::span<const int32_t> produced);

  // Processor time that a candidate may take for its masks: so much with each token, and of what it
  // did not take before no more than so much at once; and so much for all guesses of a step.
  static constexpr std::chrono::milliseconds kTimePerToken{20}, kMaxTime{250}, kMaxDraftTime{5};

  // Why the constraint allows nothing as token number `produced` (from 0) of the candidate; ok: it
  // does. Once a result has that token.
  absl::Status Stuck(int32_t produced) const;

  // Guesses that the constraint makes from the token number `produced` on, of which the candidate
  // has those before.
  std::vector<Guess> Guesses(int32_t produced, int32_t count) const
      ABSL_LOCKS_EXCLUDED(guesses_mutex_);
  // The candidate has this token as number `produced` now.
  void NoteToken(int32_t produced, int32_t token) ABSL_LOCKS_EXCLUDED(guesses_mutex_);

  // How many outputs of its last step have masks that hold, of those that follow each other.
  size_t sure_rows() const { return sure_rows_.load(std::memory_order_acquire); }
  // The mask of the step that was excused is there, or Stuck says why it is not.
  bool arrived() const { return arrived_.load(std::memory_order_acquire); }
  // Before that step is ordered again.
  void TakeUp() { arrived_.store(false, std::memory_order_relaxed); }

 private:
  friend class MaskThread;

  // Takes `tokens` and works out the next one's mask, or gives the one that is kept; and the mask
  // after each guess, as far as guesses are allowed. masks: [1 + draft.size()], of everything.
  void Advance(std::span<const int32_t> tokens, std::span<const int32_t> draft,
               std::span<OutputMask> masks) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status AdvanceTo(std::span<const int32_t> tokens, std::vector<uint32_t>& allowed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t Verify(std::span<const int32_t> draft, std::span<OutputMask> masks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Works out Guesses, behind Advance.
  void Foresee() ABSL_LOCKS_EXCLUDED(mutex_, guesses_mutex_);
  // Keeps the mask of a step that was excused, for when that is run again.
  void Keep(std::vector<uint32_t> allowed) ABSL_LOCKS_EXCLUDED(mutex_);
  // The mask of the token number `produced`, if the answer must not end yet.
  void KeepGoing(int32_t produced, std::vector<uint32_t>& allowed) const;

  const std::shared_ptr<const ConstraintGrammar> grammar_;
  const std::vector<int32_t> end_tokens_;
  const int32_t min_new_tokens_;
  const std::vector<int32_t> earlier_;  // what it had at first

  const bool foresees_;

  Mutex mutex_;  // one that is slow at it may hold it for long
  std::unique_ptr<TokenConstraint> state_ ABSL_GUARDED_BY(mutex_);
  int32_t accepted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::chrono::nanoseconds left_ ABSL_GUARDED_BY(mutex_) = kMaxTime;  // that it may take
  std::vector<uint32_t> kept_ ABSL_GUARDED_BY(mutex_);

  mutable Mutex guesses_mutex_;
  int32_t foreseen_from_ ABSL_GUARDED_BY(guesses_mutex_) = 0;  // the number of the first
  std::vector<int32_t> foreseen_ ABSL_GUARDED_BY(guesses_mutex_);
  double right_ ABSL_GUARDED_BY(guesses_mutex_) = 0.9;  // share of right ones

  std::atomic<bool> arrived_{false};
  std::atomic<size_t> sure_rows_{1};
  std::atomic<int32_t> stuck_at_{-1};
  absl::Status why_;  // written before stuck_at_
};

}  // namespace treadle
