// Bounds what a test waits for, so that what hangs fails by name and not by the limit of the suite.
//
// Thread safety: any thread.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

#include "base/status.h"
#include "base/sync.h"

namespace treadle {

// Longer than anything takes on a busy machine under a sanitizer.
inline constexpr std::chrono::minutes kTestPatience{2};

// Asks again and again whether `holds`; false: it did not within kTestPatience.
template <typename Holds>
bool ComesTrue(const Holds& holds) {
  const auto deadline = std::chrono::steady_clock::now() + kTestPatience;
  while (!holds()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Runs `work` on a thread of its own. Work that hangs ends the program, for a thread cannot be
// ended.
inline void RunInTime(const std::function<void()>& work) {
  Mutex mutex;
  CondVar changed;
  bool done = false;
  std::thread thread([&] {
    work();
    MutexLock lock(mutex);
    done = true;
    changed.NotifyAll();
  });
  {
    const auto deadline = std::chrono::steady_clock::now() + kTestPatience;
    MutexLock lock(mutex);
    while (!done) TREADLE_CHECK(changed.WaitUntil(mutex, deadline) || done);
  }
  thread.join();
}

}  // namespace treadle
