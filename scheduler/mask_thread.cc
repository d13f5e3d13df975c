#include "scheduler/mask_thread.h"

#include <time.h>

#include <algorithm>
#include <iterator>
#include <system_error>
#include <utility>

#include "base/status.h"
#include "scheduler/request.h"

namespace treadle {
namespace {

using std::chrono_literals::operator""ms;

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
      earlier_(produced.begin(), produced.empty() ? produced.end() : produced.end() - 1) {}

absl::Status MaskedCandidate::Stuck(int32_t produced) const {
  if (stuck_at_.load(std::memory_order_acquire) != produced) return absl::OkStatus();
  return why_;
}

void MaskedCandidate::Advance(int32_t token, std::vector<uint32_t>& allowed) {
  if (stuck_at_.load(std::memory_order_relaxed) >= 0) return;
  const std::chrono::nanoseconds began = ThreadTime();
  absl::Status status;
  const auto accept = [&](int32_t next) {
    if (status.ok()) status = state_->Accept(next);
    ++accepted_;
  };
  if (!state_) {
    state_ = grammar_->Begin();
    std::ranges::for_each(earlier_, accept);
  }
  if (token >= 0) accept(token);
  if (status.ok()) status = state_->FillMask(allowed);
  spent_ += ThreadTime() - began;
  if (status.ok() && spent_ > kFirstTime + accepted_ * kTimePerToken) {
    status = InvalidArgument("the constraint is too expensive: it took ", spent_ / 1ms,
                             " ms for the masks of ", accepted_ + 1, " tokens");
  }
  if (!status.ok()) {
    std::ranges::fill(allowed, ~0u);
    why_ = std::move(status);
    stuck_at_.store(accepted_, std::memory_order_release);
    return;
  }
  if (accepted_ < min_new_tokens_) KeepGoing(allowed);
}

// Without end tokens, unless nothing else is allowed.
void MaskedCandidate::KeepGoing(std::vector<uint32_t>& allowed) const {
  std::vector<uint32_t> others = allowed;
  for (const int32_t end : end_tokens_) others[end / 32] &= ~(1u << (end % 32));
  if (std::ranges::any_of(others, [](uint32_t word) { return word != 0; })) {
    allowed = std::move(others);
  }
}

MaskThread::~MaskThread() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    ordered_.NotifyOne();
  }
  if (thread_.joinable()) thread_.join();
}

void MaskThread::Order(std::vector<Step> steps) {
  try {
    if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error&) {
    return WorkOut(steps);
  }
  MutexLock lock(mutex_);
  std::ranges::move(steps, std::back_inserter(queue_));
  ordered_.NotifyOne();
}

void MaskThread::Run() {
  while (true) {
    std::vector<Step> steps;
    {
      MutexLock lock(mutex_);
      while (queue_.empty() && !stopping_) ordered_.Wait(mutex_);
      if (stopping_) return;
      steps.swap(queue_);
    }
    WorkOut(steps);
  }
}

// The engine hears of steps of one iteration that follow each other at once.
void MaskThread::WorkOut(const std::vector<Step>& steps) {
  std::vector<StepMask> masks;
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    StepMask& mask = masks.emplace_back(StepMask{.step = step.step, .allowed = {}});
    mask.allowed.assign(MaskWords(step.candidate->grammar_->vocab()), ~0u);
    if (step.wanted) step.candidate->Advance(step.token, mask.allowed);
    const bool last = i + 1 == steps.size() || steps[i + 1].iteration != step.iteration ||
                      steps[i + 1].epoch != step.epoch;
    if (last) engine_.SetMasks(step.epoch, step.iteration, std::exchange(masks, {}));
  }
}

}  // namespace treadle
