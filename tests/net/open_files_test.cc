// Limits of open files, in child processes: each has its own limit and files.
#include "net/open_files.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>

#include "base/status.h"

namespace treadle {
namespace {

// Has no open files but stdin, stdout and stderr; ends with what `work` gives.
template <typename Work>
void Alone(rlim_t soft, rlim_t hard, const Work& work) {
  closefrom(STDERR_FILENO + 1);
  const rlimit limit{soft, hard};
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) _exit(2);
  const std::string wrong = work();
  std::fprintf(stderr, "%s\n", wrong.c_str());
  std::_Exit(wrong.empty() ? 0 : 1);
}

// How many files can be opened.
int Room() {
  int count = 0;
  while (open("/dev/null", O_RDONLY) >= 0) ++count;
  return count;
}

std::string Refusal(std::span<const FileNeed> needs) {
  const absl::Status status = ReserveFiles(needs);
  return std::string(absl::IsResourceExhausted(status) ? status.message() : "no refusal");
}

const FileNeed kNeeds[] = {{"doors", 15}, {"nothing", 0}, {"a log", 2}};

TEST(OpenFiles, TheLeastLimitIsExact) {
  EXPECT_EXIT(Alone(20, 20,
                    [] {
                      if (!ReserveFiles(kNeeds).ok()) return Str("refused");
                      return Str(Room() == 17 ? "" : "there is not the room that was promised");
                    }),
              testing::ExitedWithCode(0), "");
  EXPECT_EXIT(Alone(19, 19, [] { return Refusal(kNeeds); }), testing::ExitedWithCode(1),
              "this process may open 19 files, expected at least 20 \\(ulimit -n 20\\): 3 are open "
              "already, 15 for doors, 2 for a log");
}

TEST(OpenFiles, TheSoftLimitIsRaisedAsFarAsItTakes) {
  EXPECT_EXIT(Alone(8, 64,
                    [] {
                      if (!ReserveFiles(kNeeds).ok()) return Str("refused");
                      rlimit limit{};
                      getrlimit(RLIMIT_NOFILE, &limit);
                      return limit.rlim_cur == 20 ? Str() : Str("is ", limit.rlim_cur);
                    }),
              testing::ExitedWithCode(0), "");
  EXPECT_EXIT(Alone(8, 12, [] { return Refusal(kNeeds); }), testing::ExitedWithCode(1),
              "may open 12 files, expected at least 20");
}

// Their numbers are beyond the limit, and take no room below it.
TEST(OpenFiles, FilesThatWereInheritedBeyondTheLimitTakeNoRoom) {
  EXPECT_EXIT(Alone(64, 64,
                    [] {
                      dup2(STDERR_FILENO, 40);
                      dup2(STDERR_FILENO, 10);
                      const rlimit limit{21, 21};
                      setrlimit(RLIMIT_NOFILE, &limit);
                      if (!ReserveFiles(kNeeds).ok()) return Str("refused");
                      return Str(Room() == 17 ? "" : "there is not the room that was promised");
                    }),
              testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace treadle
