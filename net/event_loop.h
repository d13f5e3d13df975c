// One thread's sockets and time, by epoll: what runs when a descriptor is ready, when a time has
// come, and what other threads post.
//
// Between two turns of the loop every descriptor that is ready is served once.
//
// Thread safety: Post from any thread; the rest from the loop's thread, or before it runs.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "base/sync.h"

namespace treadle {

class EventLoop {
 public:
  using Task = std::function<void()>;

  // A descriptor, which must outlive this, and the task for when it is ready. The task may destroy
  // its Watch.
  class Watch {
   public:
    Watch(EventLoop& loop, int fd, Task ready);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    // EPOLLIN and EPOLLOUT; errors count as either. 0, as it is made: nothing, not even errors.
    void For(uint32_t events);

   private:
    EventLoop& loop_;
    const int fd_;
    const uint64_t id_;
    uint32_t events_ = 0;
  };

  static constexpr size_t kFiles = 2;  // descriptors that a loop holds

  EventLoop();
  ~EventLoop();  // after its watches

  // Returns after Stop, once all that was posted has run. Blocks SIGPIPE on its thread, since
  // OpenSSL writes without MSG_NOSIGNAL.
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  void Stop() { stopped_ = true; }
  // In the order of the calls, and never from within one.
  void Post(Task task) ABSL_LOCKS_EXCLUDED(mutex_);
  // Forgotten where the loop stops before.
  void After(std::chrono::milliseconds time, Task task);

 private:
  using SteadyClock = std::chrono::steady_clock;
  int Timeout() ABSL_LOCKS_EXCLUDED(mutex_);  // milliseconds, for epoll_wait
  void RunPosted() ABSL_LOCKS_EXCLUDED(mutex_);
  void RunDue();

  const int epoll_;
  const int wake_;
  // By name; a number of a descriptor may be another's before the events of a turn are over.
  std::map<uint64_t, std::shared_ptr<const Task>> ready_;
  uint64_t next_ = 0;
  std::multimap<SteadyClock::time_point, Task> timers_;
  bool stopped_ = false;
  Mutex mutex_;
  std::vector<Task> posted_ ABSL_GUARDED_BY(mutex_);
  std::thread::id thread_ ABSL_GUARDED_BY(mutex_);  // which looks at posted_ before it waits
};

}  // namespace treadle
