// Changes files on disk between the system calls that read them: a test walks the change over every
// step of what it tests.
//
// Thread safety: files may be read on any thread; the rest is one thread's.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/file_calls.h"
#include "base/status.h"
#include "base/sync.h"
#include "tests/support/test_folder.h"

namespace treadle {

enum class FileEvent { kRenamedOver, kWrittenInPlace, kCopiedWithItsTimes };
inline constexpr FileEvent kFileEvents[] = {FileEvent::kRenamedOver, FileEvent::kWrittenInPlace,
                                            FileEvent::kCopiedWithItsTimes};

// Gives the file other bytes. Of another length only with kRenamedOver.
inline void ChangeFile(const std::string& path, FileEvent event, const std::string& bytes) {
  if (event == FileEvent::kRenamedOver) {
    std::ofstream(path + ".new", std::ios::binary) << bytes;
    std::filesystem::rename(path + ".new", path);
    return;
  }
  struct stat before = {};
  const int file = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  TREADLE_CHECK(file >= 0 && fstat(file, &before) == 0);
  TREADLE_CHECK(pwrite(file, bytes.data(), bytes.size(), 0) == std::ssize(bytes));
  // As `cp -p` of a file with the same size and time.
  const timespec times[] = {before.st_atim, before.st_mtim};
  if (event == FileEvent::kCopiedWithItsTimes) TREADLE_CHECK(futimens(file, times) == 0);
  close(file);
}

// While it lives, files are read through it.
class ChangingFiles : public FileCalls {
 public:
  // Steps are the calls that concern this file alone.
  explicit ChangingFiles(std::string path) : path_(std::move(path)) { Replace(this); }
  ~ChangingFiles() override { Replace(nullptr); }

  // Before the step of that number, from 0 on, and after all that was planned for it before.
  void Plan(int step, FileEvent event, std::string bytes) {
    planned_.emplace(step, std::pair(event, std::move(bytes)));
  }
  int steps() const {
    MutexLock lock(mutex_);
    return steps_;
  }

  int Open(const std::string& path) override {
    if (path == path_) Step();
    const int file = FileCalls::Open(path);
    MutexLock lock(mutex_);
    if (file >= 0) ours_[file] = path == path_;
    return file;
  }
  int Stat(int file, struct stat& info) override {
    if (Ours(file)) Step();
    return FileCalls::Stat(file, info);
  }
  void* Map(int file, size_t bytes) override {
    if (Ours(file)) Step();
    return FileCalls::Map(file, bytes);
  }
  void Use(const std::string& path) override {
    if (path == path_) Step();
  }

 private:
  bool Ours(int file) const {
    MutexLock lock(mutex_);
    const auto found = ours_.find(file);
    return found != ours_.end() && found->second;
  }
  void Step() {
    MutexLock lock(mutex_);
    const auto [begin, end] = planned_.equal_range(steps_++);
    for (auto it = begin; it != end; ++it) ChangeFile(path_, it->second.first, it->second.second);
  }

  const std::string path_;
  std::multimap<int, std::pair<FileEvent, std::string>> planned_;  // before files are read
  mutable Mutex mutex_;
  std::map<int, bool> ours_ ABSL_GUARDED_BY(mutex_);  // by descriptor
  int steps_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace treadle
