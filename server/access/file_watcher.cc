#include "server/access/file_watcher.h"

#include <sys/stat.h>

#include <chrono>
#include <utility>

#include "base/status.h"

namespace treadle {

constexpr std::chrono::seconds kPeriod{1};

absl::StatusOr<std::unique_ptr<FileWatcher>> FileWatcher::Open(std::vector<std::string> paths,
                                                               Read read, Told told) {
  std::erase(paths, "");
  std::unique_ptr<FileWatcher> watcher(
      new FileWatcher(std::move(paths), std::move(read), std::move(told)));
  watcher->seen_ = watcher->Look();  // first: a change during the first read is seen
  TREADLE_RETURN_IF_ERROR(watcher->read_());
  watcher->thread_ = std::thread([self = watcher.get()] { self->Run(); });
  return watcher;
}

FileWatcher::~FileWatcher() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    woken_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

std::string FileWatcher::Look() const {
  std::string look;
  for (const std::string& path : paths_) {
    struct stat about {};
    if (stat(path.c_str(), &about) != 0) {
      look += "absent;";
      continue;
    }
    look += Str(about.st_dev, ".", about.st_ino, ".", about.st_size, ".", about.st_mtim.tv_sec, ".",
                about.st_mtim.tv_nsec, ";");
  }
  return look;
}

void FileWatcher::Run() {
  while (true) {
    {
      MutexLock lock(mutex_);
      const auto until = std::chrono::steady_clock::now() + kPeriod;
      while (!stopping_ && woken_.WaitUntil(mutex_, until)) {
      }
      if (stopping_) return;
    }
    std::string now = Look();
    if (now == seen_) continue;
    seen_ = std::move(now);
    told_(read_());
  }
}

}  // namespace treadle
