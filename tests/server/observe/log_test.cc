// The log: a queue that never makes a caller wait, lines that are whole, and files that fail,
// vanish, are renamed, and come back.
#include "server/observe/log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "base/status.h"
#include "tests/support/in_time.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::chrono::milliseconds kPatience{120'000};

// A folder of the running test's own, empty.
fs::path Folder() {
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  const fs::path path =
      fs::path(testing::TempDir()) / Str("log-", getpid(), "-", std::string(test->name()));
  fs::remove_all(path);
  fs::create_directories(path);
  return path;
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> LinesOf(const fs::path& path) { return Lines(ReadWhole(path)); }

// The log's stderr, which nobody reads until somebody does.
class Pipe {
 public:
  Pipe() { TREADLE_CHECK(pipe2(ends_, O_CLOEXEC) == 0); }
  ~Pipe() {
    close(ends_[0]);
    CloseWriter();
  }
  int writer() const { return ends_[1]; }
  void CloseWriter() {
    if (ends_[1] >= 0) close(ends_[1]);
    ends_[1] = -1;
  }
  // To the end, which comes once the writer is closed.
  std::string ReadAll() {
    std::string all;
    char buffer[65536];
    for (ssize_t n; (n = read(ends_[0], buffer, sizeof buffer)) > 0;) {
      all.append(buffer, static_cast<size_t>(n));
    }
    return all;
  }

 private:
  int ends_[2];
};

std::unique_ptr<Log> OpenLog(const Log::Options& options) { return Log::Open(options).value(); }

// Counts of dropped lines in lines of JSON, and the messages of the others.
struct Account {
  int64_t dropped = 0;
  std::vector<std::string> messages;
};
Account AccountOf(const std::vector<std::string>& lines) {
  Account account;
  for (const std::string& line : lines) {
    const json parsed = json::parse(line, nullptr, false);
    EXPECT_TRUE(parsed.is_object()) << line;
    if (!parsed.is_object()) continue;
    if (parsed["event"] == "log_lines_dropped") {
      account.dropped += parsed["lines"].get<int64_t>();
    } else {
      account.messages.push_back(parsed["message"]);
    }
  }
  return account;
}

// -- the queue ------------------------------------------------------------------------------------

TEST(Log, WritesWhatIsAtLeastItsLevelInOrderUntilItIsGone) {
  const fs::path file = Folder() / "log";
  {
    const auto log = OpenLog({.level = Severity::kWarning, .file = file});
    for (int i = 0; i < 1000; ++i) {
      log->Write({.severity = static_cast<Severity>(i % 3), .message = std::to_string(i)});
    }
  }
  std::vector<std::string> expected;
  for (int i = 0; i < 1000; ++i) {
    if (i % 3 > 0) expected.push_back(std::to_string(i));
  }
  EXPECT_EQ(LinesOf(file), expected);
}

TEST(Log, EveryThreadsLinesComeOnceAndInItsOrder) {
  constexpr int kThreads = 8;
  constexpr int kEvents = 2000;
  const fs::path file = Folder() / "log";
  const auto log = OpenLog({.format = LogFormat::kJson, .file = file, .queue_bytes = 64 << 20});
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      const LogSink sink = log->sink();
      for (int i = 0; i < kEvents; ++i) {
        sink({.name = "tick", .message = "tick", .fields = {{"thread", thread}, {"i", i}}});
        if (i % 500 == 0) log->Flush(milliseconds(0));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(log->Flush(kPatience));
  EXPECT_EQ(log->dropped(), 0u);
  std::map<int, int> next;
  for (const std::string& line : LinesOf(file)) {
    const json event = json::parse(line);
    EXPECT_EQ(event["i"], next[event["thread"]]++) << line;
  }
  EXPECT_EQ(next.size(), size_t{kThreads});
  for (const auto& [thread, count] : next) EXPECT_EQ(count, kEvents);
}

// Nobody reads the pipe: whoever writes goes on all the same, memory stays bounded, and in the end
// every line has come out or been counted.
TEST(Log, AFullQueueDropsAndSaysHowMany) {
  constexpr int kEvents = 20'000;
  Pipe pipe;
  auto log = OpenLog({.format = LogFormat::kJson,
                      .standard = pipe.writer(),
                      .queue_bytes = 200'000,
                      .flush_timeout = kPatience});
  for (int i = 0; i < kEvents; ++i) log->Write({.name = "tick", .message = std::to_string(i)});
  EXPECT_FALSE(log->Flush(milliseconds(10)));
  const uint64_t dropped = log->dropped();
  // The pipe's 64 KiB are at most 820 lines of 80 bytes, the queue's 200 KB at most 1700 events of
  // 120; and as many may be on their way out.
  EXPECT_GT(dropped, uint64_t{kEvents} - 5000);
  std::string all;
  std::thread reader([&] { all = pipe.ReadAll(); });
  EXPECT_TRUE(log->Flush(kPatience));
  log.reset();
  pipe.CloseWriter();
  reader.join();
  const Account account = AccountOf(Lines(all));
  EXPECT_EQ(account.dropped, static_cast<int64_t>(dropped));
  ASSERT_EQ(account.messages.size() + dropped, size_t{kEvents});
  EXPECT_EQ(account.messages[0], "0");
}

TEST(Log, WhatHasComeOutMakesRoom) {
  const fs::path file = Folder() / "log";
  const auto log = OpenLog({.file = file, .queue_bytes = 1000});
  for (int i = 0; i < 100; ++i) {
    log->Write({.message = std::string(100, 'x')});
    ASSERT_TRUE(log->Flush(kPatience));
  }
  EXPECT_EQ(log->dropped(), 0u);
  EXPECT_EQ(LinesOf(file).size(), 100u);
}

TEST(Log, EndsInTimeAlthoughItsReaderSleeps) {
  auto pipe = std::make_unique<Pipe>();
  auto log = OpenLog({.standard = pipe->writer(), .flush_timeout = milliseconds(20)});
  for (int i = 0; i < 3000; ++i) log->Write({.message = std::string(100, 'x')});
  RunInTime([&] { log.reset(); });
  pipe.reset();  // the thread that was left behind now ends
}

TEST(Log, LongStringsAreCut) {
  const fs::path file = Folder() / "log";
  const auto log = OpenLog({.format = LogFormat::kJson, .file = file});
  log->Write({.message = std::string(100'000, 'm'), .fields = {{"f", std::string(100'000, 'f')}}});
  ASSERT_TRUE(log->Flush(kPatience));
  const std::vector<std::string> lines = LinesOf(file);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(json::parse(lines[0])["message"], std::string(4096, 'm'));
  EXPECT_EQ(json::parse(lines[0])["f"], std::string(4096, 'f'));
}

// -- files ----------------------------------------------------------------------------------------

TEST(LogFile, AppendsToWhatIsThere) {
  const fs::path file = Folder() / "log";
  std::ofstream(file) << "before\n";
  OpenLog({.file = file})->Write({.message = "after"});
  EXPECT_THAT(LinesOf(file), ElementsAre("before", "after"));
}

TEST(LogFile, WhatCannotBeOpenedIsNamed) {
  const fs::path folder = Folder();
  for (const std::string& path : {folder.string(), (folder / "no" / "log").string()}) {
    const absl::Status status = Log::Open({.file = path}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr("log file '" + path + "': "));
  }
}

TEST(LogFile, ARenamedOneIsOpenedAnew) {
  const fs::path folder = Folder();
  const auto log = OpenLog({.file = folder / "log"});
  for (const char* name : {"1", "2"}) {
    log->Write({.message = name});
    ASSERT_TRUE(log->Flush(kPatience));
    fs::rename(folder / "log", folder / name);
  }
  std::ofstream(folder / "log") << "made by logrotate\n";
  log->Write({.message = "3"});
  ASSERT_TRUE(log->Flush(kPatience));
  EXPECT_THAT(LinesOf(folder / "log"), ElementsAre("made by logrotate", "3"));
  fs::remove(folder / "log");
  log->Write({.message = "4"});
  ASSERT_TRUE(log->Flush(kPatience));
  EXPECT_THAT(LinesOf(folder / "1"), ElementsAre("1"));
  EXPECT_THAT(LinesOf(folder / "2"), ElementsAre("2"));
  EXPECT_THAT(LinesOf(folder / "log"), ElementsAre("4"));
}

TEST(LogFile, AVanishedFolderIsReportedOnceAndUsedAgainWhenItIsBack) {
  const fs::path folder = Folder() / "logs";
  fs::create_directory(folder);
  Pipe pipe;
  {
    const auto log =
        OpenLog({.format = LogFormat::kJson, .file = folder / "log", .standard = pipe.writer()});
    log->Write({.message = "seen"});
    ASSERT_TRUE(log->Flush(kPatience));
    fs::remove_all(folder);
    for (int i = 0; i < 5; ++i) {
      log->Write({.message = "lost"});
      ASSERT_TRUE(log->Flush(kPatience));
    }
    EXPECT_EQ(log->dropped(), 5u);
    fs::create_directory(folder);
    log->Write({.message = "back"});
    ASSERT_TRUE(log->Flush(kPatience));
    EXPECT_EQ(log->dropped(), 5u);
  }
  pipe.CloseWriter();
  const Account account = AccountOf(LinesOf(folder / "log"));
  EXPECT_EQ(account.dropped, 5);
  EXPECT_THAT(account.messages, ElementsAre("back"));
  EXPECT_THAT(AccountOf(Lines(pipe.ReadAll())).messages,
              ElementsAre(HasSubstr("No such file or directory")));
}

TEST(LogFile, AFullDeviceLosesLinesAndNothingElse) {
  Pipe pipe;
  {
    const auto log = OpenLog({.file = "/dev/full", .standard = pipe.writer()});
    for (int i = 0; i < 100; ++i) log->Write({.message = "lost"});
    ASSERT_TRUE(log->Flush(kPatience));
    EXPECT_EQ(log->dropped(), 100u);
  }
  pipe.CloseWriter();
  EXPECT_THAT(Lines(pipe.ReadAll()),
              ElementsAre("log file '/dev/full': No space left on device; lines are dropped until "
                          "it can be written"));
}

// A disk that is full for a while, as a limit on the size of files. The limit's signal must not end
// the process, and no line is left in part.
TEST(LogFile, ALimitIsNeverMetWithHalfALine) {
  constexpr int kEvents = 50;
  const fs::path file = Folder() / "log";
  Pipe pipe;
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  uint64_t dropped = 0;
  {
    const auto log = OpenLog({.format = LogFormat::kJson, .file = file, .standard = pipe.writer()});
    const rlimit small{2000, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    for (int i = 0; i < kEvents; ++i) log->Write({.message = std::to_string(i)});
    const bool flushed = log->Flush(kPatience);
    dropped = log->dropped();
    const std::vector<std::string> lines = LinesOf(file);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    ASSERT_TRUE(flushed);
    EXPECT_EQ(AccountOf(lines).messages.size() + dropped, size_t{kEvents});
    EXPECT_GT(lines.size(), 5u);
    EXPECT_GT(dropped, 5u);
    log->Write({.message = "after"});
  }
  pipe.CloseWriter();
  const Account account = AccountOf(LinesOf(file));
  EXPECT_EQ(account.dropped, static_cast<int64_t>(dropped));
  ASSERT_EQ(account.messages.size() + dropped, size_t{kEvents} + 1);
  EXPECT_EQ(account.messages.back(), "after");
  EXPECT_THAT(AccountOf(Lines(pipe.ReadAll())).messages, ElementsAre(HasSubstr("File too large")));
}

// Not even stderr: there is nobody to tell, and nothing waits.
TEST(LogFile, AClosedStderrOnlyCounts) {
  Pipe pipe;
  const int closed = dup(pipe.writer());
  close(closed);
  const auto log = OpenLog({.standard = closed});
  log->Write({.message = "lost"});
  ASSERT_TRUE(log->Flush(kPatience));
  EXPECT_EQ(log->dropped(), 1u);
}

}  // namespace
}  // namespace treadle
