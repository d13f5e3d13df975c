// Reads a few files, and reads them again when one has changed: by time, size or identity, looked
// at once a second. Files that are replaced as a whole, as Kubernetes and certbot do, are seen as
// well.
//
// Thread safety: the first read is on Open's thread, later ones on the watcher's.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync.h"

namespace treadle {

class FileWatcher {
 public:
  // The error is that of the first `read`. `told` hears how each later one went. Empty paths are
  // left out.
  static absl::StatusOr<std::unique_ptr<FileWatcher>> Open(
      std::vector<std::string> paths, std::function<absl::Status()> read,
      std::function<void(const absl::Status&)> told);
  ~FileWatcher();  // joins

 private:
  FileWatcher(std::vector<std::string> paths, std::function<absl::Status()> read,
              std::function<void(const absl::Status&)> told);
  std::string Look() const;
  void Run();

  const std::vector<std::string> paths_;
  const std::function<absl::Status()> read_;
  const std::function<void(const absl::Status&)> told_;
  std::string seen_;  // the thread's, once it runs

  Mutex mutex_;
  CondVar woken_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace treadle
