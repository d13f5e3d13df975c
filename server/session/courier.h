// Between the serving loop and the clients: a thread of the server's own.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <vector>

#include "base/background.h"
#include "base/sync.h"

namespace treadle {

// An object with something to deliver. Both methods run on the courier's thread and must not block.
class Recipient {
 public:
  virtual ~Recipient() = default;
  virtual void Deliver() = 0;
  // The time given to WakeAt came.
  virtual void OnAlarm() {}

 private:
  friend class Courier;
  std::atomic<bool> posted_{false};
  std::atomic<bool> alarmed_{false};
};

// The server's own thread between the serving loop and the clients: whenever a stream has news, its
// call is delivered here, so the loop never detokenizes, writes or waits. The same thread watches
// writes that stall.
//
// Thread safety: Post and WakeAt from any thread (Post costs the loop one atomic exchange when the
// recipient is already on the list).
class Courier {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // The destructor delivers what was posted.
  void Post(std::shared_ptr<Recipient> recipient) ABSL_LOCKS_EXCLUDED(mutex_);
  // At most one alarm is pending: nothing happens while there is one.
  void WakeAt(TimePoint when, const std::shared_ptr<Recipient>& recipient)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  TimePoint Deliver();  // the time of the next alarm

  Mutex mutex_;
  std::vector<std::shared_ptr<Recipient>> posted_ ABSL_GUARDED_BY(mutex_);
  std::multimap<TimePoint, std::weak_ptr<Recipient>> alarms_ ABSL_GUARDED_BY(mutex_);

  std::vector<std::shared_ptr<Recipient>> delivered_, due_;  // the thread's
  PulseThread pulse_{[this] { return Deliver(); }};          // last: it uses the others
};

}  // namespace treadle
