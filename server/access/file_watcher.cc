#include "server/access/file_watcher.h"

#include <sys/stat.h>

#include <utility>

#include "base/status.h"

namespace treadle {

FileWatcher::FileWatcher(std::vector<std::string> paths, std::function<void()> changed,
                         std::chrono::milliseconds period)
    : paths_(std::move(paths)), changed_(std::move(changed)), period_(period), seen_(Look()) {
  thread_ = std::thread([this] { Run(); });
}

FileWatcher::~FileWatcher() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    woken_.NotifyAll();
  }
  thread_.join();
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
      const auto until = std::chrono::steady_clock::now() + period_;
      while (!stopping_ && std::chrono::steady_clock::now() < until) {
        woken_.WaitUntil(mutex_, until);
      }
      if (stopping_) return;
    }
    std::string now = Look();
    if (now == seen_) continue;
    seen_ = std::move(now);
    changed_();
  }
}

}  // namespace treadle
