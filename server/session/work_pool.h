// The threads that requests are read on: parsing, templates, tokenizing and detokenizing, which
// take as long as a client's text is long, and trials of constraints, which take seconds; none of
// which a client may do on the threads that answer others.
//
// Three threads take work from two queues. One thread takes the next text and another only
// what is short, so that a few long texts do not hold up everybody's short ones; the third thread
// runs trials, so that no text waits for one. A queue gives each owner who waits as much of a
// processor as the others (fair_queue.h). Its size is bounded in entries and bytes, in total and
// for one owner, and refused beyond that. The threads are nice to the serving loop's.
//
// Thread safety: Submit from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "base/sync.h"
#include "server/session/fair_queue.h"

namespace treadle {

class WorkPool {
 public:
  struct Limits {
    size_t entries = 1024;
    size_t bytes = 32 << 20;
    size_t short_bytes = 32 << 10;  // what is short
  };
  // The part of the limits that one owner may take, but for his first entry.
  static constexpr size_t OwnersPart(size_t limit) { return limit - limit / 4; }

  struct Counts {
    std::atomic<int64_t> running{0};  // now
    std::atomic<int64_t> waiting{0};
  };
  enum class Kind : uint8_t { kText, kTrial };

  explicit WorkPool(const Limits& limits);
  ~WorkPool() { Stop(); }

  // Returns when what was taken in is done: before what work uses may end. By one thread, any
  // number of times.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

  // `bytes`: of the text that the work goes over, or keeps. ResourceExhausted says which bound is
  // reached; Unavailable from Stop on: nothing was taken in.
  absl::Status Submit(const std::string& owner, size_t bytes, std::function<void()> work,
                      Kind kind = Kind::kText) ABSL_LOCKS_EXCLUDED(mutex_);
  // The bytes of all work that waits or is being done.
  size_t bytes() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::shared_ptr<const Counts> counts() const { return counts_; }

 private:
  struct Held {
    size_t entries = 0;  // that wait
    size_t bytes = 0;    // of those, and of what is being done
  };

  // Takes work of at most `most_bytes`.
  void Run(Kind kind, size_t most_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CheckRoom(const Held& own, size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Done(Kind kind, const FairQueue::Entry& entry, double seconds) ABSL_LOCKS_EXCLUDED(mutex_);

  const Limits limits_;
  const std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
  mutable Mutex mutex_;
  CondVar changed_;
  FairQueue queues_[2] ABSL_GUARDED_BY(mutex_);  // by Kind
  Held all_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Held> owners_ ABSL_GUARDED_BY(mutex_);  // who have something here
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread any_, short_, trials_;  // last: they use the others
};

}  // namespace treadle
