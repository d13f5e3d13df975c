#include "server/session/work_pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr int kNiceness = 5;

}  // namespace

WorkPool::WorkPool(const Limits& limits)
    : limits_(limits), any_([this] { Run(false); }), short_([this] { Run(true); }) {}

void WorkPool::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  if (any_.joinable()) any_.join();
  if (short_.joinable()) short_.join();
}

absl::Status WorkPool::Submit(size_t bytes, std::function<void()> work) {
  MutexLock lock(mutex_);
  if (stopping_) return absl::UnavailableError("the server is shutting down");
  if (queue_.size() >= limits_.entries || bytes > limits_.bytes - std::min(bytes_, limits_.bytes)) {
    ++counts_->refused;
    return ResourceExhausted("the server has ", queue_.size(), " requests of ", bytes_,
                             " bytes to read, at most ", limits_.entries, " of ", limits_.bytes,
                             " wait (--max-unread-requests, --max-unread-bytes)");
  }
  bytes_ += bytes;
  queue_.push_back({bytes, std::move(work)});
  ++counts_->waiting;
  changed_.NotifyAll();
  return absl::OkStatus();
}

size_t WorkPool::bytes() const {
  MutexLock lock(mutex_);
  return bytes_;
}

std::deque<WorkPool::Entry>::iterator WorkPool::Next(bool only_short) {
  return std::ranges::find_if(queue_, [&](const Entry& entry) {
    return !only_short || entry.bytes <= limits_.short_bytes;
  });
}

void WorkPool::Run(bool only_short) {
  // On Linux a process id of 0 means this thread. A refusal only costs latency.
  setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + kNiceness);
  while (true) {
    Entry entry;
    {
      MutexLock lock(mutex_);
      auto next = Next(only_short);
      while (next == queue_.end()) {
        if (stopping_) return;
        changed_.Wait(mutex_);
        next = Next(only_short);
      }
      entry = std::move(*next);
      queue_.erase(next);
      --counts_->waiting;
      ++counts_->running;
    }
    entry.work();
    entry.work = nullptr;  // what it holds goes before it stops counting
    --counts_->running;
    MutexLock lock(mutex_);
    bytes_ -= entry.bytes;
  }
}

}  // namespace treadle
