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
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync.h"

namespace treadle {

class FileWatcher {
 public:
  using Read = std::function<absl::Status()>;
  using Told = std::function<void(const absl::Status&)>;

  // The error is that of the first `read`. `told` hears how each later one went. Empty paths are
  // left out.
  static absl::StatusOr<std::unique_ptr<FileWatcher>> Open(std::vector<std::string> paths,
                                                           Read read, Told told);
  ~FileWatcher();  // joins

 private:
  FileWatcher(std::vector<std::string> paths, Read read, Told told)
      : paths_(std::move(paths)), read_(std::move(read)), told_(std::move(told)) {}
  std::string Look() const;
  void Run();

  const std::vector<std::string> paths_;
  const Read read_;
  const Told told_;
  std::string seen_;  // the thread's, once it runs

  Mutex mutex_;
  CondVar woken_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace treadle
