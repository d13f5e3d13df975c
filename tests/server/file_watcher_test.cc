// Changes that times and sizes do not show.
#include "server/access/file_watcher.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "tests/server/access/test_certificates.h"
#include "tests/support/in_time.h"

namespace treadle {
namespace {

using testing::ElementsAre;

// In place, with as many bytes, and the time of modification stays: as when two changes fall into
// one tick of the file system's clock.
void Overwrite(const std::string& path, const std::string& text) {
  struct stat about {};
  ASSERT_EQ(stat(path.c_str(), &about), 0);
  ASSERT_EQ(static_cast<size_t>(about.st_size), text.size());
  std::ofstream(path) << text;
  const timespec times[] = {about.st_atim, about.st_mtim};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

class Taken {
 public:
  FileWatcher::Take take() {
    return [this](const std::vector<FileWatcher::Content>& contents) {
      MutexLock lock(mutex_);
      for (const auto& content : contents) taken_.push_back(content.value_or("absent"));
      if (during_) std::exchange(during_, {})();
      return absl::OkStatus();
    };
  }
  // Once, while contents are taken.
  void During(std::function<void()> during) {
    MutexLock lock(mutex_);
    during_ = std::move(during);
  }
  std::vector<std::string> WaitFor(size_t count) {
    ComesTrue([&] { return all().size() >= count; });
    return all();
  }
  std::vector<std::string> all() {
    MutexLock lock(mutex_);
    return taken_;
  }

 private:
  Mutex mutex_;
  std::vector<std::string> taken_ ABSL_GUARDED_BY(mutex_);
  std::function<void()> during_ ABSL_GUARDED_BY(mutex_);
};

const auto kNobody = [](const absl::Status&) {};

TEST(FileWatcher, AChangeWithinOneTickOfTheClockIsTakenOver) {
  const std::string path = TestPath("tick");
  WriteText(path, "one");
  Taken taken;
  const auto watcher = FileWatcher::Open({path}, taken.take(), kNobody);
  ASSERT_TRUE(watcher.ok());
  Overwrite(path, "two");
  EXPECT_THAT(taken.WaitFor(2), ElementsAre("one", "two"));
}

TEST(FileWatcher, AChangeWhileTheFirstContentsAreTakenIsTakenOver) {
  const std::string path = TestPath("first");
  WriteText(path, "one");
  Taken taken;
  taken.During([&] { Overwrite(path, "two"); });
  const auto watcher = FileWatcher::Open({path}, taken.take(), kNobody);
  ASSERT_TRUE(watcher.ok());
  EXPECT_THAT(taken.WaitFor(2), ElementsAre("one", "two"));
}

TEST(FileWatcher, WhatIsWrittenAgainAsItWasIsNotTakenOverTwice) {
  const std::string path = TestPath("same"), absent = TestPath("no-such");
  WriteText(path, "one");
  Taken taken;
  const auto watcher = FileWatcher::Open({path, "", absent}, taken.take(), kNobody);
  ASSERT_TRUE(watcher.ok());
  WriteText(path, "one");
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_THAT(taken.all(), ElementsAre("one", "", "absent"));
  WriteText(path, "two");
  EXPECT_THAT(taken.WaitFor(6), ElementsAre("one", "", "absent", "two", "", "absent"));
}

TEST(FileWatcher, APipeIsReadOnce) {
  const std::string path = TestPath("pipe");
  unlink(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  Taken taken;
  {
    std::thread writer([&] { std::ofstream(path) << "one"; });
    const auto watcher = FileWatcher::Open({path}, taken.take(), kNobody);
    writer.join();
    ASSERT_TRUE(watcher.ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  }  // does not wait for another writer
  EXPECT_THAT(taken.all(), ElementsAre("one"));
}

}  // namespace
}  // namespace treadle
