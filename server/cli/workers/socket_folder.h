// A folder for the sockets of workers, below the system's temporary folder. Only this user can
// enter it.
//
// The owner holds a lock on a file in it for as long as it lives, whatever ends it. So a folder
// whose lock can be had belongs to nobody any more, and whoever starts next removes it.
//
// Invariant: a file of the name kLock is locked from the moment it has that name. A folder without
// one is about to get it, or of a program that knew no locks.
//
// Thread safety: none; RemoveAbandoned from any thread.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

class SocketFolder {
 public:
  static constexpr char kPrefix[] = "treadle-";
  static constexpr char kLock[] = "lock";
  // The age from which a folder without a lock may be removed.
  static constexpr std::chrono::hours kOld{1};

  // A new folder in `parent`. Unavailable says why there is none. Where the file system has no
  // locks the folder has none either.
  static absl::StatusOr<std::unique_ptr<SocketFolder>> Create(const std::filesystem::path& parent);
  ~SocketFolder();  // removes it and all that is in it
  SocketFolder(const SocketFolder&) = delete;
  SocketFolder& operator=(const SocketFolder&) = delete;

  const std::string& path() const { return path_; }

  // Removes the folders in `parent` that are this user's, have a name and permissions as Create
  // gives, hold nothing but sockets of workers, and whose owner has gone: the lock can be had, or
  // there is none, the folder is kOld, and nobody listens on its sockets. Symbolic links are not
  // followed. Gives their paths.
  static std::vector<std::string> RemoveAbandoned(const std::filesystem::path& parent);

 private:
  explicit SocketFolder(std::string path) : path_(std::move(path)) {}
  void Lock();

  const std::string path_;
  int lock_ = -1;
};

}  // namespace treadle
