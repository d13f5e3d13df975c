#include "server/observe/log_file.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/status.h"

namespace treadle {

LogFile LogFile::Duplicate(int fd) { return LogFile("", fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

absl::StatusOr<LogFile> LogFile::Open(const std::string& path) {
  LogFile file(path, -1);
  TREADLE_RETURN_IF_ERROR(file.OpenPath());
  return file;
}

LogFile::~LogFile() {
  if (fd_ >= 0) close(fd_);
}

LogFile::LogFile(LogFile&& other) noexcept
    : path_(other.path_), fd_(std::exchange(other.fd_, -1)) {}

// O_NONBLOCK is for a FIFO that nobody reads, where open would wait.
absl::Status LogFile::OpenPath() {
  fd_ =
      open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0640);
  if (fd_ < 0) {
    return InvalidArgument("log file '", path_, "': ", std::strerror(errno),
                           ", expected a file that can be written");
  }
  fcntl(fd_, F_SETFL, O_APPEND);
  return absl::OkStatus();
}

absl::Status LogFile::LookAtPath() {
  struct stat there {};
  struct stat ours {};
  if (fd_ >= 0 && stat(path_.c_str(), &there) == 0 && fstat(fd_, &ours) == 0 &&
      there.st_dev == ours.st_dev && there.st_ino == ours.st_ino) {
    return absl::OkStatus();
  }
  if (fd_ >= 0) close(fd_);
  return OpenPath();
}

void LogFile::CutOff(size_t bytes) {
  struct stat about {};
  if (fstat(fd_, &about) != 0 || !S_ISREG(about.st_mode)) return;
  // If even this fails, a part of a line stays in the file.
  [[maybe_unused]] const int result = ftruncate(fd_, about.st_size - static_cast<off_t>(bytes));
}

absl::Status LogFile::Write(std::string_view line) {
  if (!path_.empty()) TREADLE_RETURN_IF_ERROR(LookAtPath());
  size_t written = 0;
  while (written < line.size()) {
    const ssize_t n = write(fd_, line.data() + written, line.size() - written);
    if (n >= 0) {
      written += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {  // whoever shares stderr made it so
      pollfd writable{fd_, POLLOUT, 0};
      poll(&writable, 1, -1);
    } else if (errno != EINTR) {
      const absl::Status failed =
          absl::UnavailableError(Str("log file '", path_, "': ", std::strerror(errno)));
      if (written > 0) CutOff(written);
      return failed;
    }
  }
  return absl::OkStatus();
}

}  // namespace treadle
