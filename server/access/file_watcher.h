// Says when one of a few files has changed: by time, size or identity, looked at once a second.
// Files that are replaced as a whole, as Kubernetes and certbot do, are seen as well.
//
// Thread safety: `changed` runs on the watcher's thread.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/sync.h"

namespace treadle {

class FileWatcher {
 public:
  FileWatcher(std::vector<std::string> paths, std::function<void()> changed,
              std::chrono::milliseconds period = std::chrono::milliseconds(1000));
  ~FileWatcher();  // joins

 private:
  std::string Look() const;
  void Run();

  const std::vector<std::string> paths_;
  const std::function<void()> changed_;
  const std::chrono::milliseconds period_;
  std::string seen_;  // the thread's

  Mutex mutex_;
  CondVar woken_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace treadle
