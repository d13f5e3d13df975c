// The ledger's file on a disk that is full for a while, and on one that hangs.
#include "server/observe/ledger_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "base/status.h"
#include "base/sync.h"
#include "tests/server/access/test_certificates.h"
#include "tests/support/assert_ok.h"
#include "tests/support/in_time.h"

namespace treadle {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using SteadyClock = std::chrono::steady_clock;

// Lines that the log is told.
class Told {
 public:
  LogSink sink() {
    return [this](const LogEvent& event) {
      MutexLock lock(mutex_);
      names_.push_back(event.name);
      messages_.push_back(event.message);
    };
  }
  std::vector<std::string> names() const {
    MutexLock lock(mutex_);
    return names_;
  }
  std::vector<std::string> messages() const {
    MutexLock lock(mutex_);
    return messages_;
  }

 private:
  mutable Mutex mutex_;
  std::vector<std::string> names_ ABSL_GUARDED_BY(mutex_), messages_ ABSL_GUARDED_BY(mutex_);
};

// The iterations that the lines name; each line is a whole record.
std::vector<uint64_t> Iterations(std::istream&& text) {
  std::vector<uint64_t> iterations;
  for (std::string line; std::getline(text, line);) {
    const json record = json::parse(line, nullptr, false);
    EXPECT_TRUE(record.is_object()) << line;
    if (record.is_object()) iterations.push_back(record["iteration"]);
  }
  return iterations;
}

TEST(LedgerFile, ADiskThatWasFullIsWrittenAgainOnAWholeLine) {
  constexpr uint64_t kRecords = 50;
  const std::string path = TestPath("ledger-full");
  std::ofstream(path) << "of an earlier server\n";
  Told told;
  ASSERT_OK_AND_ASSIGN(auto file, LedgerFile::Open(path, told.sink()));
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{2000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto handled = [&] {  // a part of a line may be there for a moment
    std::ifstream text(path);
    const auto lines = std::count(std::istreambuf_iterator<char>(text), {}, '\n');
    return static_cast<uint64_t>(lines) + file->dropped() == kRecords;
  };
  for (uint64_t i = 0; i < kRecords; ++i) file->Write({.iteration = i});
  const bool all = ComesTrue(handled);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  ASSERT_TRUE(all);
  const uint64_t dropped = file->dropped();
  EXPECT_GT(dropped, 10u);
  EXPECT_LT(dropped, kRecords);
  EXPECT_THAT(told.names(), ElementsAre("ledger_file_failed"));
  file->Write({.iteration = kRecords});
  file->Write({.iteration = kRecords + 1});
  file.reset();
  const std::vector<uint64_t> iterations = Iterations(std::ifstream(path));
  ASSERT_EQ(iterations.size(), kRecords - dropped + 2);
  EXPECT_EQ(iterations[0], 0u);
  EXPECT_EQ(iterations[iterations.size() - 2], kRecords);
  EXPECT_THAT(told.messages(),
              ElementsAre(Str("ledger file '", path,
                              "': File too large; records are dropped until it can be written"),
                          Str("ledger file '", path, "' is written again; ", dropped,
                              " records were dropped"),
                          Str("ledger file '", path, "': ", dropped, " of ", kRecords + 2,
                              " records were not written")));
}

TEST(LedgerFile, AFullDeviceIsToldOnceAndAtTheEnd) {
  Told told;
  {
    ASSERT_OK_AND_ASSIGN(auto file, LedgerFile::Open("/dev/full", told.sink()));
    for (int i = 0; i < 100; ++i) file->Write({});
  }
  EXPECT_THAT(told.messages(),
              ElementsAre(HasSubstr("No space left on device; records are dropped until"),
                          "ledger file '/dev/full': 100 of 100 records were not written"));
}

// A pipe that nobody reads takes 64 KiB and then nothing.
class HungDisk {
 public:
  explicit HungDisk(const std::string& path) {
    unlink(path.c_str());
    TREADLE_CHECK(mkfifo(path.c_str(), 0600) == 0);
    fd_ = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    TREADLE_CHECK(fd_ >= 0);
  }
  ~HungDisk() { close(fd_); }
  // Text that has come until now.
  std::string Read() {
    std::string all;
    char buffer[65536];
    for (ssize_t n; (n = read(fd_, buffer, sizeof buffer)) > 0;) {
      all.append(buffer, static_cast<size_t>(n));
    }
    return all;
  }

 private:
  int fd_;
};

// More than a pipe and the queue take.
constexpr uint64_t kTooMany = 40'000;

TEST(LedgerFile, AHungDiskHoldsUpNobodyAndTheEndIsInTime) {
  const std::string path = TestPath("ledger-hung");
  HungDisk disk(path);
  Told told;
  ASSERT_OK_AND_ASSIGN(auto file, LedgerFile::Open(path, told.sink()));
  for (uint64_t i = 0; i < kTooMany; ++i) file->Write({.iteration = i});  // comes back
  EXPECT_GT(file->dropped(), 0u);
  const auto began = SteadyClock::now();
  file.reset();
  EXPECT_LT(SteadyClock::now() - began, std::chrono::seconds(10));
  EXPECT_THAT(told.names(), ElementsAre("ledger_file_failed", "ledger_file_incomplete"));
  EXPECT_THAT(told.messages()[0], HasSubstr("does not keep up; records are dropped until"));
  EXPECT_THAT(told.messages()[1], EndsWith(" of 40000 records were not written"));
  // Nobody hears of a thread that was left behind.
  while (!disk.Read().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(told.names().size(), 2u);
}

TEST(LedgerFile, ADiskThatWakesUpGetsWhatWaitedAndEachRecordIsWrittenOrCounted) {
  const std::string path = TestPath("ledger-woken");
  HungDisk disk(path);
  Told told;
  ASSERT_OK_AND_ASSIGN(auto file, LedgerFile::Open(path, told.sink()));
  for (uint64_t i = 0; i < kTooMany; ++i) file->Write({.iteration = i});
  std::string all;
  ASSERT_TRUE(ComesTrue([&] {
    all += disk.Read();
    return told.names().size() == 2;
  }));
  file.reset();
  all += disk.Read();
  EXPECT_THAT(told.names(),
              ElementsAre("ledger_file_failed", "ledger_file_resumed", "ledger_file_incomplete"));
  const std::vector<uint64_t> iterations = Iterations(std::istringstream(all));
  EXPECT_THAT(told.messages()[2], EndsWith(Str(": ", kTooMany - iterations.size(),
                                               " of 40000 records were not written")));
  EXPECT_TRUE(std::ranges::is_sorted(iterations));
}

TEST(LedgerFile, WhatCannotBeOpenedIsNamed) {
  EXPECT_EQ(LedgerFile::Open("/no/such/ledger", {}).status().message(),
            "ledger file '/no/such/ledger': No such file or directory, expected a file that can be "
            "written");
}

}  // namespace
}  // namespace treadle
