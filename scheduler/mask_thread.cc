#include "scheduler/mask_thread.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <system_error>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr int kNiceness = 15;  // of a thread at a step that nobody waits for

// Masks of the step's outputs that allow everything.
std::vector<OutputMask> AllAllowed(const MaskThread::Step& step, int32_t vocab) {
  const std::vector<uint32_t> all(MaskWords(vocab), ~0u);
  std::vector<OutputMask> masks;
  for (int32_t row = 0; row <= std::ssize(step.draft); ++row) {
    masks.push_back({.step = step.step, .output = step.output + row, .allowed = all});
  }
  return masks;
}

}  // namespace

MaskThread::~MaskThread() {
  std::vector<std::unique_ptr<Worker>> workers;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    ordered_.NotifyAll();
    workers = std::move(workers_);
  }
  for (const auto& worker : workers) worker->thread.join();
}

void MaskThread::Order(std::vector<Step> steps) {
  {
    MutexLock lock(mutex_);
    if (!workers_.empty() || StartWorker()) {
      std::ranges::move(steps, std::back_inserter(queue_));
      ordered_.NotifyAll();
      return;
    }
  }
  for (const Step& step : steps) WorkOut(step);
}

// False if there is no thread to be had.
bool MaskThread::StartWorker() {
  for (auto& worker : workers_) {
    if (worker->ended) worker->thread.join();
  }
  std::erase_if(workers_, [](const auto& worker) { return worker->ended; });
  if (workers_.size() == kMaxThreads) return false;
  auto worker = std::make_unique<Worker>();
  try {
    worker->thread = std::thread([this, worker = worker.get()] { Run(*worker); });
  } catch (const std::system_error&) {
    return false;
  }
  workers_.push_back(std::move(worker));
  return true;
}

void MaskThread::Run(Worker& worker) {
  for (Step step; Next(worker, step);) WorkOut(step);
}

bool MaskThread::Next(Worker& worker, Step& step) {
  MutexLock lock(mutex_);
  worker.id = gettid();
  if (!worker.relieved) at_ = nullptr;
  while (queue_.empty() && !stopping_ && !worker.relieved) {
    if (ahead_.empty()) {
      ordered_.Wait(mutex_);
      continue;
    }
    std::shared_ptr<MaskedCandidate> candidate = std::move(ahead_.front());
    ahead_.pop_front();
    at_ = std::make_shared<std::atomic<bool>>(true);  // nobody waits for it
    mutex_.Unlock();
    candidate->Foresee();
    candidate.reset();  // not under the lock: its grammar may go with it
    mutex_.Lock();
    if (!worker.relieved) at_ = nullptr;
  }
  worker.ended = stopping_ || worker.relieved;
  if (worker.ended) return false;
  step = std::move(queue_.front());
  queue_.pop_front();
  std::erase(ahead_, step.candidate);
  at_ = step.given;
  return true;
}

void MaskThread::WorkOut(const Step& step) {
  std::vector<OutputMask> masks = AllAllowed(step, step.candidate->grammar_->vocab());
  step.candidate->Advance(step.tokens, step.draft, masks);
  if (step.given->exchange(true)) {
    step.candidate->Keep(std::move(masks[0].allowed));
    return wake_();
  }
  std::vector<Done> done;
  {
    MutexLock lock(mutex_);
    done_.push_back({step.epoch, step.iteration, std::move(masks)});
    ahead_.push_back(step.candidate);
    // Steps of one iteration that follow each other at once are told together.
    if (!queue_.empty() && queue_.front().iteration == step.iteration &&
        queue_.front().epoch == step.epoch) {
      return;
    }
    done = std::exchange(done_, {});
  }
  Give(std::move(done));
}

void MaskThread::Give(std::vector<Done> done) {
  std::vector<OutputMask> masks;
  for (size_t i = 0; i < done.size(); ++i) {
    std::ranges::move(done[i].masks, std::back_inserter(masks));
    const bool last = i + 1 == done.size() || done[i + 1].iteration != done[i].iteration ||
                      done[i + 1].epoch != done[i].epoch;
    if (last) engine_.SetMasks(done[i].epoch, done[i].iteration, std::exchange(masks, {}));
  }
}

void MaskThread::Allow(const Step& step) {
  engine_.SetMasks(step.epoch, step.iteration, AllAllowed(step, step.candidate->grammar_->vocab()));
}

bool MaskThread::Excuse(const Step& step) {
  if (step.given->exchange(true)) return false;
  Allow(step);
  return true;
}

void MaskThread::Relieve() {
  std::vector<Done> done;
  {
    MutexLock lock(mutex_);
    done = std::exchange(done_, {});
    // At a step that nobody waits for any more.
    if (at_ != nullptr && at_->load()) {
      Worker& slow = *workers_.back();
      if (StartWorker()) {
        slow.relieved = true;
        at_ = nullptr;
        setpriority(PRIO_PROCESS, static_cast<id_t>(slow.id), kNiceness);  // or is refused
      }
    }
  }
  Give(std::move(done));
}

}  // namespace treadle
