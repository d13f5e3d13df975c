#include "server/session/work_pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/status.h"
#include "server/observe/refusals.h"

namespace treadle {
namespace {

constexpr int kNiceness = 5;

// Seconds of a processor that this thread has had, with what its children had: only the thread of
// trials waits for processes.
double ProcessorSeconds(bool with_children) {
  double seconds = 0;
  for (const int who : {RUSAGE_THREAD, RUSAGE_CHILDREN}) {
    rusage used{};
    if (who == RUSAGE_CHILDREN && !with_children) continue;
    getrusage(who, &used);
    for (const timeval& time : {used.ru_utime, used.ru_stime}) {
      seconds += static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
    }
  }
  return seconds;
}

}  // namespace

WorkPool::WorkPool(const Limits& limits)
    : limits_(limits),
      any_([this] { Run(Kind::kText, SIZE_MAX); }),
      short_([this] { Run(Kind::kText, limits_.short_bytes); }),
      trials_([this] { Run(Kind::kTrial, SIZE_MAX); }) {}

void WorkPool::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  // A text may become a trial, which is refused from now on.
  for (std::thread* thread : {&any_, &short_, &trials_}) {
    if (thread->joinable()) thread->join();
  }
}

absl::Status WorkPool::CheckRoom(const Held& own, size_t bytes) const {
  const auto full = [bytes](const Held& held, size_t most_entries, size_t most_bytes) {
    return held.entries >= most_entries || bytes > most_bytes - std::min(held.bytes, most_bytes);
  };
  if (full(all_, limits_.entries, limits_.bytes)) {
    return ResourceExhausted("the server has ", all_.entries, " requests of ", all_.bytes,
                             " bytes to read, at most ", limits_.entries, " of ", limits_.bytes,
                             " wait (--max-unread-requests, --max-unread-bytes)");
  }
  const size_t entries = OwnersPart(limits_.entries), most = OwnersPart(limits_.bytes);
  if ((own.entries > 0 || own.bytes > 0) && full(own, entries, most)) {
    return ResourceExhausted("the server has ", own.entries, " requests of ", own.bytes,
                             " bytes to read of this key or address, at most ", entries, " of ",
                             most, " wait (three quarters of --max-unread-requests, ",
                             "--max-unread-bytes)");
  }
  return absl::OkStatus();
}

absl::Status WorkPool::Submit(const std::string& owner, size_t bytes, std::function<void()> work,
                              Kind kind) {
  MutexLock lock(mutex_);
  if (stopping_) return absl::UnavailableError("the server is shutting down");
  const auto own = owners_.find(owner);
  const absl::Status room = CheckRoom(own == owners_.end() ? Held() : own->second, bytes);
  if (!room.ok()) return Because(RefusalReason::kUnreadFull, room);
  for (Held* held : {&all_, &owners_[owner]}) {
    ++held->entries;
    held->bytes += bytes;
  }
  queues_[static_cast<size_t>(kind)].Push({owner, bytes, std::move(work)});
  ++counts_->waiting;
  changed_.NotifyAll();
  return absl::OkStatus();
}

size_t WorkPool::bytes() const {
  MutexLock lock(mutex_);
  return all_.bytes;
}

void WorkPool::Run(Kind kind, size_t most_bytes) {
  // On Linux a process id of 0 means this thread. A refusal only costs latency.
  setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + kNiceness);
  while (true) {
    FairQueue::Entry entry;
    {
      MutexLock lock(mutex_);
      FairQueue& queue = queues_[static_cast<size_t>(kind)];
      auto next = queue.Pop(most_bytes);
      while (!next) {
        if (stopping_) return;
        changed_.Wait(mutex_);
        next = queue.Pop(most_bytes);
      }
      entry = *std::move(next);
      --all_.entries;
      --owners_[entry.owner].entries;
      --counts_->waiting;
      ++counts_->running;
    }
    const double before = ProcessorSeconds(kind == Kind::kTrial);
    entry.work();
    entry.work = nullptr;  // what it holds goes before it stops counting
    --counts_->running;
    Done(kind, entry, ProcessorSeconds(kind == Kind::kTrial) - before);
  }
}

void WorkPool::Done(Kind kind, const FairQueue::Entry& entry, double seconds) {
  MutexLock lock(mutex_);
  queues_[static_cast<size_t>(kind)].Charge(entry.owner, seconds);
  all_.bytes -= entry.bytes;
  const auto own = owners_.find(entry.owner);
  if (own == owners_.end()) return;  // another of its entries, of no bytes, was the last
  own->second.bytes -= entry.bytes;
  if (own->second.entries == 0 && own->second.bytes == 0) owners_.erase(own);
}

}  // namespace treadle
