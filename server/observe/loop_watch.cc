#include "server/observe/loop_watch.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPeriod{50};
constexpr milliseconds kWarmUpPeriod{2};  // until it has come out
constexpr milliseconds kWarmUpPause{200};
constexpr milliseconds kWakeAfter{1000};  // of a loop that waits

}  // namespace

LoopWatch::LoopWatch(ServingStack& stack, HealthBoard& board, const Options& options)
    : stack_(stack), board_(board), options_(options), warm_(!options.warm_up) {
  turned_ = woken_ = Clock::now();
  SubmitWarmUp();
  stack_.pool().Wake();  // a first turn, to tell whether the engine stands
  thread_ = std::thread([this] { Run(); });
}

LoopWatch::~LoopWatch() {
  Drain();
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
  board_.Set(Probe::kStarted, false);
}

void LoopWatch::Drain() {
  MutexLock lock(mutex_);
  draining_ = true;
  board_.Set(Probe::kReady, false);
  changed_.NotifyAll();
}

void LoopWatch::Run() {
  while (true) {
    if (!warm_) FollowWarmUp();
    const Clock::time_point now = Clock::now();
    board_.Set(Probe::kLive, LoopTurns(now));
    const bool stands = stack_.engine_stands();
    if (warm_ && stands && !std::exchange(told_, true) && options_.on_ready) options_.on_ready();
    MutexLock lock(mutex_);
    if (stopping_) return;
    if (draining_ && warm_up_) {
      stack_.pool().Cancel(warm_up_->id, absl::UnavailableError("the server is draining"));
    }
    board_.Set(Probe::kReady, warm_ && stands && !draining_);
    changed_.WaitUntil(mutex_, now + (warm_ || draining_ ? kPeriod : kWarmUpPeriod));
  }
}

void LoopWatch::SubmitWarmUp() {
  if (warm_) return;
  next_warm_up_ = Clock::now() + kWarmUpPause;
  RequestSpec spec;
  spec.client_id = "warm-up";
  spec.internal = true;
  spec.prompt = {std::max(stack_.model().bos(), 0)};
  spec.sampling.temperature = 0;
  spec.max_new_tokens = 1;
  auto submitted = stack_.pool().Submit(std::move(spec));
  if (submitted.ok()) warm_up_ = *std::move(submitted);
}

void LoopWatch::FollowWarmUp() {
  if (!warm_up_) {
    if (stack_.engine_stands() && Clock::now() >= next_warm_up_) SubmitWarmUp();
    return;
  }
  const StreamBatch batch = warm_up_->stream->Take();
  if (!batch.ended) return;
  warm_ = batch.status.ok();
  warm_up_.reset();
}

bool LoopWatch::LoopTurns(Clock::time_point now) {
  const uint64_t turns = stack_.turns();
  if (turns != std::exchange(turns_, turns)) turned_ = now;
  if (now - std::max(turned_, woken_) >= std::min(kWakeAfter, options_.loop_patience / 4)) {
    stack_.pool().Wake();
    woken_ = now;
  }
  return now - turned_ < options_.loop_patience;
}

}  // namespace treadle
