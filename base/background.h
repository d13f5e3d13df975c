// Two kinds of thread that work until they are destroyed: one that runs tasks in order, and one
// that does the same again and again. As a member, such a thread comes last: it uses the others.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <thread>
#include <utility>

#include "base/sync.h"

namespace treadle {

// Runs tasks one after the other. Thread safety: Post, busy and waiting from any thread.
class TaskThread {
 public:
  TaskThread() : thread_([this] { Run(); }) {}
  // Runs what was posted, then ends.
  ~TaskThread() {
    Post(nullptr);
    thread_.join();
  }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  void Post(std::function<void()> task) {
    MutexLock lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.NotifyOne();
  }
  bool busy() {
    MutexLock lock(mutex_);
    return running_ || !tasks_.empty();
  }
  // Tasks that have not begun.
  size_t waiting() {
    MutexLock lock(mutex_);
    return tasks_.size();
  }

 private:
  void Run() {
    while (std::function<void()> task = Next()) task();
  }
  std::function<void()> Next() {
    MutexLock lock(mutex_);
    running_ = false;
    while (tasks_.empty()) changed_.Wait(mutex_);
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    running_ = true;
    return task;
  }

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// Calls `beat` at once, then whenever it is nudged, and at the time that the last call returned.
// Nudges that come during a call make one more call. Thread safety: Nudge from any thread, `beat`
// too.
class PulseThread {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  static constexpr TimePoint kNever = TimePoint::max();

  explicit PulseThread(std::function<TimePoint()> beat)
      : beat_(std::move(beat)), thread_([this] { Run(); }) {}
  // Joins. A nudge that no call has followed yet gets one.
  ~PulseThread() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      changed_.NotifyOne();
    }
    thread_.join();
  }
  PulseThread(const PulseThread&) = delete;
  PulseThread& operator=(const PulseThread&) = delete;

  void Nudge() {
    MutexLock lock(mutex_);
    nudged_ = true;
    changed_.NotifyOne();
  }

 private:
  void Run() {
    for (TimePoint next = beat_(); Wait(next);) next = beat_();
  }
  bool Wait(TimePoint next) {
    MutexLock lock(mutex_);
    while (!stopping_ && !nudged_ && std::chrono::steady_clock::now() < next) {
      if (next == kNever) {
        changed_.Wait(mutex_);
      } else {
        changed_.WaitUntil(mutex_, next);
      }
    }
    return std::exchange(nudged_, false) || !stopping_;
  }

  const std::function<TimePoint()> beat_;
  Mutex mutex_;
  CondVar changed_;
  bool nudged_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace treadle
