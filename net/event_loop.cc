#include "net/event_loop.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr int kEvents = 128;  // that one call takes
constexpr uint64_t kWake = ~uint64_t{0};

}  // namespace

EventLoop::Watch::Watch(EventLoop& loop, int fd, Task ready)
    : loop_(loop), fd_(fd), id_(loop.next_++) {
  loop_.ready_.emplace(id_, std::make_shared<const Task>(std::move(ready)));
}

EventLoop::Watch::~Watch() {
  For(0);
  loop_.ready_.erase(id_);
}

void EventLoop::Watch::For(uint32_t events) {
  if (events == events_) return;
  epoll_event event{.events = events, .data = {.u64 = id_}};
  const int op = events == 0 ? EPOLL_CTL_DEL : events_ == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  TREADLE_CHECK(epoll_ctl(loop_.epoll_, op, fd_, &event) == 0);
  events_ = events;
}

EventLoop::EventLoop()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kWake}};
  TREADLE_CHECK(epoll_ >= 0 && wake_ >= 0 && epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) == 0);
}

EventLoop::~EventLoop() {
  close(epoll_);
  close(wake_);
}

void EventLoop::Run() {
  sigset_t broken_pipe;
  sigemptyset(&broken_pipe);
  sigaddset(&broken_pipe, SIGPIPE);
  TREADLE_CHECK(pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr) == 0);
  {
    MutexLock lock(mutex_);
    thread_ = std::this_thread::get_id();
  }
  std::vector<epoll_event> events(kEvents);
  while (!stopped_) {
    const int count = epoll_wait(epoll_, events.data(), kEvents, Timeout());
    for (int i = 0; i < count; ++i) {
      const uint64_t id = events[static_cast<size_t>(i)].data.u64;
      if (id == kWake) {
        uint64_t ignored = 0;
        TREADLE_CHECK(read(wake_, &ignored, sizeof ignored) == sizeof ignored);
      } else if (const auto found = ready_.find(id); found != ready_.end()) {
        const std::shared_ptr<const Task> task = found->second;  // it may destroy its Watch
        (*task)();
      }
    }
    RunPosted();
    RunDue();
  }
  timers_.clear();
  while (Timeout() == 0) RunPosted();
}

void EventLoop::Post(Task task) {
  MutexLock lock(mutex_);
  posted_.push_back(std::move(task));
  if (posted_.size() > 1 || std::this_thread::get_id() == thread_) return;
  const uint64_t one = 1;
  TREADLE_CHECK(write(wake_, &one, sizeof one) == sizeof one);
}

void EventLoop::After(std::chrono::milliseconds time, Task task) {
  timers_.emplace(SteadyClock::now() + time, std::move(task));
}

int EventLoop::Timeout() {
  {
    MutexLock lock(mutex_);
    if (!posted_.empty()) return 0;
  }
  if (timers_.empty()) return -1;
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(timers_.begin()->first - SteadyClock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30));
}

void EventLoop::RunPosted() {
  std::vector<Task> posted;
  {
    MutexLock lock(mutex_);
    posted.swap(posted_);
  }
  for (Task& task : posted) {
    task();
    task = nullptr;  // what it holds goes before the next one runs
  }
}

void EventLoop::RunDue() {
  for (const auto now = SteadyClock::now(); !timers_.empty() && timers_.begin()->first <= now;) {
    const Task task = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    task();
  }
}

}  // namespace treadle
