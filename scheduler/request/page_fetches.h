// Has pages read from files (engine/kv/page_files.h) for requests that wait, before they begin.
//
// A request whose pages are being read is not admitted, and so nobody behind it is: nobody is
// overtaken, and whoever runs goes on. It waits no longer than computing these pages would take, or
// kMaxWait, and begins then after what has been read. Nothing is read where that takes longer than
// computing, and no more than kMaxBytes for all requests that wait.
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "base/sync.h"
#include "engine/kv/kv_slot_manager.h"
#include "scheduler/request/request.h"

namespace treadle {

class PageFetches {
 public:
  static constexpr int64_t kMaxBytes = 256 << 20;
  static constexpr std::chrono::seconds kMaxWait{10};  // that a request waits

  // `wake` is called from another thread when pages have been read, and not after the destructor.
  PageFetches(KvSlotManager& kv, std::function<void()> wake) : kv_(kv) {
    MutexLock lock(bell_->mutex);
    bell_->wake = std::move(wake);
  }
  ~PageFetches() {
    MutexLock lock(bell_->mutex);
    bell_->wake = nullptr;
  }
  PageFetches(const PageFetches&) = delete;
  PageFetches& operator=(const PageFetches&) = delete;

  // Takes what has been read, and begins to read for others. Returns when it must look again.
  Clock::time_point Turn(std::span<const std::unique_ptr<Request>> requests, Clock::time_point now);
  // An iteration of so many rows took so long.
  void NoteIteration(int64_t rows, double seconds);

 private:
  struct Bell {
    Mutex mutex;
    std::function<void()> wake ABSL_GUARDED_BY(mutex);
  };
  // Reads `most` pages at most.
  void Begin(Request& request, int64_t most, Clock::time_point now);

  KvSlotManager& kv_;
  const std::shared_ptr<Bell> bell_ = std::make_shared<Bell>();
};

// How many positions the pages hold that a request begins with, if the first `kept` are in the
// cache: these, or those that were read for it, too.
int32_t WithFetched(const Request& request, int32_t kept, int64_t page_size);

}  // namespace treadle
