// The threads that requests are read on: parsing, templates, tokenizing and detokenizing, which
// take as long as a client's text is long, and none of which a client may do on the threads that
// answer others.
//
// Work waits in a queue of so many entries and bytes, and is refused where that is full. One thread
// takes whatever came first; the other only what is short, so that a few long texts do not hold up
// everybody's short ones. Both are nice to the serving loop's threads.
//
// Thread safety: Submit from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "base/sync.h"

namespace treadle {

class WorkPool {
 public:
  struct Limits {
    size_t entries = 1024;
    size_t bytes = 32 << 20;
    size_t short_bytes = 32 << 10;  // what is short
  };

  struct Counts {
    std::atomic<int64_t> running{0};  // now
    std::atomic<int64_t> waiting{0};
    std::atomic<int64_t> refused{0};  // for a full queue, so far
  };

  explicit WorkPool(const Limits& limits);
  ~WorkPool() { Stop(); }

  // Returns when what was taken in is done: before what work uses may end. By one thread, any
  // number of times.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

  // `bytes`: of the text that the work goes over. ResourceExhausted if the queue is full, or
  // Unavailable from Stop on: nothing was taken in.
  absl::Status Submit(size_t bytes, std::function<void()> work) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same of what may take long however short its text is.
  absl::Status SubmitLong(std::function<void()> work) {
    return Submit(limits_.short_bytes + 1, std::move(work));
  }
  // Of what waits or is being done.
  size_t bytes() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::shared_ptr<const Counts> counts() const { return counts_; }

 private:
  struct Entry {
    size_t bytes;
    std::function<void()> work;
  };

  void Run(bool only_short) ABSL_LOCKS_EXCLUDED(mutex_);
  // The first that this thread takes; end() if there is none.
  std::deque<Entry>::iterator Next(bool only_short) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Limits limits_;
  const std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<Entry> queue_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread any_, short_;  // last: they use the others
};

}  // namespace treadle
