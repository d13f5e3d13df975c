// A file that is written while others may delete, move or replace it.
//
// Thread safety: WriteAt from one thread at a time; all else from any. Errors are Unavailable and
// name the file and the reason.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace treadle {

class NamedFile {
 public:
  // `flags`: open(2)'s. A file that is created is its user's alone (mode 0600).
  static absl::StatusOr<std::shared_ptr<NamedFile>> Open(const std::string& path, int flags);
  ~NamedFile();
  NamedFile(const NamedFile&) = delete;
  NamedFile& operator=(const NamedFile&) = delete;

  // If not all of it can be written, the file ends at `offset`.
  absl::Status WriteAt(uint64_t offset, std::string_view bytes);
  // Waits until what was written is on the disk, then checks the name.
  absl::Status Sync();
  // An error if the path no longer names this file.
  absl::Status CheckName();
  // False if another process has the file.
  bool Lock() const;

  // An earlier check of the name, Sync, or the end of a failed write failed: the file is no longer
  // to be used.
  bool lost() const { return lost_; }
  const std::string& path() const { return path_; }

 private:
  NamedFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  const std::string path_;
  const int fd_;
  std::atomic<bool> lost_ = false;
};

// Waits until the folder's entries are on the disk.
absl::Status SyncFolder(const std::string& path);

}  // namespace treadle
