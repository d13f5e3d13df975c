#include "server/durable/named_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/status.h"

namespace treadle {
namespace {

absl::Status Error(const std::string& path) {
  return absl::UnavailableError(Str(path, ": ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::shared_ptr<NamedFile>> NamedFile::Open(const std::string& path, int flags) {
  const int fd = open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0600);  // a pipe does not hang
  if (fd < 0) return Error(path);
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return absl::UnavailableError(path + " is not a regular file");
  }
  return std::shared_ptr<NamedFile>(new NamedFile(path, fd));
}

NamedFile::~NamedFile() { close(fd_); }

absl::Status NamedFile::WriteAt(uint64_t offset, std::string_view bytes) {
  size_t written = 0;
  while (written < bytes.size()) {
    const ssize_t n = pwrite(fd_, bytes.data() + written, bytes.size() - written,
                             static_cast<off_t>(offset + written));
    if (n >= 0) {
      written += static_cast<size_t>(n);
    } else if (errno != EINTR) {
      const absl::Status failed = Error(path_);
      if (ftruncate(fd_, static_cast<off_t>(offset)) != 0) lost_ = true;
      return failed;
    }
  }
  return absl::OkStatus();
}

absl::Status NamedFile::Sync() {
  // Pages that could not be written are no longer dirty: a further try would succeed, and be wrong.
  if (lost_ || fdatasync(fd_) != 0) {
    if (!lost_.exchange(true)) return Error(path_);
    return absl::UnavailableError(path_ + ": an earlier error lost what was written");
  }
  return CheckName();
}

absl::Status NamedFile::CheckName() {
  struct stat mine {
  }, named{};
  if (fstat(fd_, &mine) == 0 && stat(path_.c_str(), &named) == 0 && mine.st_ino == named.st_ino &&
      mine.st_dev == named.st_dev) {
    return absl::OkStatus();
  }
  lost_ = true;
  return absl::UnavailableError(path_ + " was deleted while it was in use");
}

bool NamedFile::Lock() const { return flock(fd_, LOCK_EX | LOCK_NB) == 0; }

absl::Status SyncFolder(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return Error(path);
  const absl::Status status = fsync(fd) == 0 ? absl::OkStatus() : Error(path);
  close(fd);
  return status;
}

}  // namespace treadle
