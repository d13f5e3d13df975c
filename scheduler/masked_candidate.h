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
#include "scheduler/token_constraint.h"

namespace treadle {

class MaskThread;
struct RequestSpec;

class MaskedCandidate {
 public:
  // `produced`: the tokens that it has, of which the last is given with its first order.
  MaskedCandidate(const RequestSpec& spec, std::span<const int32_t> produced);

  // Processor time that a candidate may take for its masks: so much with each token, and of what it
  // did not take before no more than so much at once.
  static constexpr std::chrono::milliseconds kTimePerToken{20}, kMaxTime{250};

  // Why the constraint allows nothing as token number `produced` (from 0) of the candidate; ok: it
  // does. Once a result has that token.
  absl::Status Stuck(int32_t produced) const;

  // The mask of the step that was excused is there, or Stuck says why it is not.
  bool arrived() const { return arrived_.load(std::memory_order_acquire); }
  // Before that step is ordered again.
  void TakeUp() { arrived_.store(false, std::memory_order_relaxed); }

 private:
  friend class MaskThread;

  // Takes `token` (-1: none yet) and works out the next one's mask; or gives the one that is kept.
  void Advance(int32_t token, std::vector<uint32_t>& allowed);
  // Keeps the mask of a step that was excused, for when that is run again.
  void Keep(std::vector<uint32_t> allowed);
  void KeepGoing(std::vector<uint32_t>& allowed) const;

  const std::shared_ptr<const ConstraintGrammar> grammar_;
  const std::vector<int32_t> end_tokens_;
  const int32_t min_new_tokens_;
  const std::vector<int32_t> earlier_;  // all that it has but the last

  // Confined to the mask thread.
  std::unique_ptr<TokenConstraint> state_;
  int32_t accepted_ = 0;
  std::chrono::nanoseconds left_ = kMaxTime;  // that it may take
  std::vector<uint32_t> kept_;

  std::atomic<bool> arrived_{false};
  std::atomic<int32_t> stuck_at_{-1};
  absl::Status why_;  // written before stuck_at_
};

}  // namespace treadle
