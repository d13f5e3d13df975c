// Reads a few files, and reads them again once a second: when their contents are others than the
// last ones, they are handed over. Times and sizes do not matter, so a change is seen however soon
// it follows another, in place or by files that are replaced as a whole, as Kubernetes and certbot
// do.
//
// Thread safety: the first read is on Open's thread, later ones on the watcher's.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/background.h"

namespace treadle {

class FileWatcher {
 public:
  // A file's bytes, or why it cannot be read.
  using Content = absl::StatusOr<std::string>;
  // Gets the contents of all paths, in their order.
  using Take = std::function<absl::Status(const std::vector<Content>&)>;
  using Told = std::function<void(const absl::Status&)>;

  // The error is that of the first `take`. `told` hears how each later one went. Files that can be
  // read only once, as pipes, are not watched.
  static absl::StatusOr<std::unique_ptr<FileWatcher>> Open(std::vector<std::string> paths,
                                                           Take take, Told told);

  // The error is the system's reason only. An empty path is an empty file.
  static Content Read(const std::string& path);

 private:
  FileWatcher(std::vector<std::string> paths, Take take, Told told)
      : paths_(std::move(paths)), take_(std::move(take)), told_(std::move(told)) {}
  std::vector<Content> ReadAll() const;
  void Look();

  const std::vector<std::string> paths_;
  const Take take_;
  const Told told_;
  std::string taken_;  // digest of the last contents; the thread's, once it runs
  std::optional<PulseThread> pulse_;
};

}  // namespace treadle
