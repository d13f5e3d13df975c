#include "scheduler/request/masked_candidate.h"

#include <time.h>

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "scheduler/request/request.h"

namespace treadle {
namespace {

using std::chrono_literals::operator""ms;

constexpr double kLearning = 1.0 / 8;  // the weight of the newest guess

std::chrono::nanoseconds ThreadTime() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace

MaskedCandidate::MaskedCandidate(const RequestSpec& spec, std::span<const int32_t> produced)
    : grammar_(spec.constraint),
      end_tokens_(spec.end_tokens),
      min_new_tokens_(spec.min_new_tokens),
      earlier_(produced.begin(), produced.end()),
      foresees_(spec.speculate != Speculate::kOff) {}

absl::Status MaskedCandidate::Stuck(int32_t produced) const {
  if (stuck_at_.load(std::memory_order_acquire) != produced) return absl::OkStatus();
  return why_;
}

void MaskedCandidate::Advance(std::span<const int32_t> tokens, std::span<const int32_t> draft,
                              std::span<OutputMask> masks) {
  MutexLock lock(mutex_);
  sure_rows_.store(1, std::memory_order_release);
  std::vector<uint32_t>& allowed = masks[0].allowed;
  if (!kept_.empty()) {
    allowed = std::exchange(kept_, {});
  } else if (stuck_at_.load(std::memory_order_relaxed) >= 0) {
    return;
  } else if (absl::Status status = AdvanceTo(tokens, allowed); !status.ok()) {
    std::ranges::fill(allowed, ~0u);
    why_ = std::move(status);
    stuck_at_.store(accepted_, std::memory_order_release);
    return;
  } else {
    KeepGoing(accepted_, allowed);
  }
  sure_rows_.store(1 + Verify(draft, masks.subspan(1)), std::memory_order_release);
}

absl::Status MaskedCandidate::AdvanceTo(std::span<const int32_t> tokens,
                                        std::vector<uint32_t>& allowed) {
  const std::chrono::nanoseconds began = ThreadTime();
  absl::Status status;
  const auto accept = [&](int32_t next) {
    if (status.ok()) status = state_->Accept(next);
    left_ = std::min<std::chrono::nanoseconds>(left_ + kTimePerToken, kMaxTime);
    ++accepted_;
  };
  if (!state_) {
    state_ = grammar_->Begin();
    std::ranges::for_each(earlier_, accept);
  }
  std::ranges::for_each(tokens, accept);
  if (status.ok()) status = state_->FillMask(allowed);
  const std::chrono::nanoseconds took = ThreadTime() - began;
  left_ -= took;
  // One that goes on after a loss may take its earlier tokens once more.
  if (status.ok() && left_ + std::ssize(earlier_) * kTimePerToken < 0ms) {
    status = InvalidArgument("the constraint is too expensive: its masks take more than ",
                             kTimePerToken.count(), " ms a token; that of token ", accepted_ + 1,
                             " took ", took / 1ms, " ms");
  }
  return status;
}

// The masks after guesses, of which it gives the number: up to one that is not allowed, after which
// nothing is, or for which there is no time.
size_t MaskedCandidate::Verify(std::span<const int32_t> draft, std::span<OutputMask> masks) {
  const std::chrono::nanoseconds began = ThreadTime();
  size_t sure = 0;
  int32_t taken = 0;
  while (sure < draft.size() && ThreadTime() - began < kMaxDraftTime) {
    if (!state_->Accept(draft[sure]).ok()) break;
    ++taken;
    std::vector<uint32_t>& allowed = masks[sure].allowed;
    if (!state_->FillMask(allowed).ok()) {
      std::ranges::fill(allowed, ~0u);
      break;
    }
    KeepGoing(accepted_ + taken, allowed);
    ++sure;
  }
  if (taken > 0) state_->Rollback(taken);
  left_ -= ThreadTime() - began;  // which shows with the next token
  return sure;
}

void MaskedCandidate::Foresee() {
  if (!foresees_) return;
  MutexLock lock(mutex_);
  // One that is dear is not asked for more than its masks.
  if (!state_ || left_ < kMaxTime / 2 || stuck_at_.load(std::memory_order_relaxed) >= 0) return;
  const std::chrono::nanoseconds began = ThreadTime();
  std::vector<int32_t> tokens = state_->Foresee();
  left_ -= ThreadTime() - began;
  MutexLock guesses(guesses_mutex_);
  foreseen_from_ = accepted_;
  foreseen_ = std::move(tokens);
}

std::vector<Guess> MaskedCandidate::Guesses(int32_t produced, int32_t count) const {
  MutexLock lock(guesses_mutex_);
  std::vector<Guess> guesses;
  double probability = 1;
  for (int64_t i = produced - foreseen_from_; i < std::ssize(foreseen_) && count-- > 0; ++i) {
    if (i < 0) break;
    guesses.push_back({foreseen_[static_cast<size_t>(i)], probability *= right_});
  }
  return guesses;
}

void MaskedCandidate::NoteToken(int32_t produced, int32_t token) {
  MutexLock lock(guesses_mutex_);
  const int64_t i = produced - foreseen_from_;
  if (i < 0 || i >= std::ssize(foreseen_)) return;
  const bool right = foreseen_[static_cast<size_t>(i)] == token;
  right_ += kLearning * ((right ? 1.0 : 0.0) - right_);
  if (!right) foreseen_.clear();
}

void MaskedCandidate::Keep(std::vector<uint32_t> allowed) {
  MutexLock lock(mutex_);
  kept_ = std::move(allowed);
  arrived_.store(true, std::memory_order_release);
}

// Without end tokens, unless nothing else is allowed.
void MaskedCandidate::KeepGoing(int32_t produced, std::vector<uint32_t>& allowed) const {
  if (produced >= min_new_tokens_) return;
  std::vector<uint32_t> others = allowed;
  for (const int32_t end : end_tokens_) others[end / 32] &= ~(1u << (end % 32));
  if (std::ranges::any_of(others, [](uint32_t word) { return word != 0; })) {
    allowed = std::move(others);
  }
}

}  // namespace treadle
