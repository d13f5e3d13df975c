// Where log lines end up: a descriptor that was there already (stderr), or a file by its path.
//
// A file is appended to. Before each line its path is looked at, so that one that was renamed or
// removed (logrotate) is opened anew without a signal. A line is written whole or, in a file, not
// at all: a part that came through before a disk was full is cut off again.
//
// Thread safety: none; Write from one thread, which blocks SIGXFSZ and SIGPIPE.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace treadle {

class LogFile {
 public:
  // Writes to a duplicate of `fd`; if there is none, every write fails.
  static LogFile Duplicate(int fd);
  // InvalidArgument names the path and why it cannot be opened.
  static absl::StatusOr<LogFile> Open(const std::string& path);

  ~LogFile();
  LogFile(LogFile&& other) noexcept;
  LogFile& operator=(LogFile&&) = delete;

  // May block as long as what it writes to does. An error leaves it as it was: the next line tries
  // again.
  absl::Status Write(std::string_view line);

 private:
  LogFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  absl::Status OpenPath();
  absl::Status LookAtPath();
  void CutOff(size_t bytes);

  const std::string path_;  // empty: not by a path
  int fd_;                  // -1: to be opened, or none
};

}  // namespace treadle
