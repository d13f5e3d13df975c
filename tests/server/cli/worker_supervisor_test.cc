// The supervisor over real processes that are shell scripts: starting, restarting, ending, and what
// it says when one cannot be started.
#include "server/cli/worker_supervisor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "base/status.h"
#include "base/sync.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr auto kPatience = seconds(60);

// What the supervisor says, and something to wait for it with.
class Journal {
 public:
  std::function<void(const std::string&)> Writer() {
    return [this](const std::string& line) {
      MutexLock lock(mutex_);
      lines_.push_back(line);
      written_.NotifyAll();
    };
  }
  // The line that contains `text`, the `count`th of its kind; "" if it does not come.
  std::string WaitFor(const std::string& text, int count = 1) {
    const auto patience = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (true) {
      int seen = 0;
      for (const std::string& line : lines_) {
        if (line.find(text) != std::string::npos && ++seen == count) return line;
      }
      if (!written_.WaitUntil(mutex_, patience)) return "";
    }
  }
  std::vector<std::string> lines() {
    MutexLock lock(mutex_);
    return lines_;
  }

 private:
  Mutex mutex_;
  CondVar written_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
};

class Supervisor : public testing::Test {
 protected:
  // `script` is run in place of the program; its arguments are those of a worker.
  WorkerSupervisor::Options Workers(const std::string& script,
                                    std::vector<std::vector<std::string>> arguments) {
    const std::string path = testing::TempDir() + "/worker-" + std::to_string(getpid()) + ".sh";
    std::ofstream(path) << "#!/bin/sh\n" << script;
    chmod(path.c_str(), 0700);
    WorkerSupervisor::Options options;
    options.program = path;
    options.arguments = std::move(arguments);
    options.log = [write = log.Writer(), note = lost.Writer()](const LogEvent& event) {
      write(event.message);
      if (event.name == "worker_lost") note(event.message.substr(0, event.message.find("; ")));
    };
    return options;
  }
  ~Supervisor() override {
    std::filesystem::remove(testing::TempDir() + "/worker-" + std::to_string(getpid()) + ".sh");
  }

  Journal log;
  Journal lost;
};

bool Gone(pid_t process) { return kill(process, 0) != 0 && errno == ESRCH; }

// What a worker does as long as it is well; $3 is the address it was given.
const std::string kListen = "echo \"listening on $3\"\n";
const std::string kServe = kListen + "while true; do sleep 0.05; done\n";

TEST_F(Supervisor, StartsWorkersAndLeavesNoneBehind) {
  auto started = WorkerSupervisor::Start(
      Workers("echo \"$@\"\n" + kServe, {{"--threads", "1"}, {"--threads", "2"}}));
  ASSERT_TRUE(started.ok()) << started.status();
  const std::vector<std::string> addresses = (*started)->addresses();
  const std::vector<pid_t> processes = (*started)->processes();
  ASSERT_EQ(processes.size(), 2u);
  for (const pid_t process : processes) {
    ASSERT_GT(process, 0);
    EXPECT_EQ(getpgid(process), process) << "a terminal's signals would reach it";
  }
  EXPECT_EQ(log.WaitFor("--threads 2"), Str("worker 1: worker --listen ", addresses[1],
                                            " --parent ", getpid(), " --threads 2"));
  ASSERT_TRUE(addresses[0].starts_with("unix:"));
  const auto directory = std::filesystem::path(addresses[0].substr(5)).parent_path();
  struct stat about;
  ASSERT_EQ(stat(directory.c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777, 0700u) << "others could attach";
  started->reset();
  for (const pid_t process : processes) EXPECT_TRUE(Gone(process));
  EXPECT_FALSE(std::filesystem::exists(directory));
  EXPECT_THAT(lost.lines(), IsEmpty());
}

TEST_F(Supervisor, RestartsOneThatEndsAtTheSameAddress) {
  auto started = WorkerSupervisor::Start(Workers(kServe, {{}, {}}));
  ASSERT_TRUE(started.ok()) << started.status();
  const std::vector<pid_t> before = (*started)->processes();
  kill(before[1], SIGKILL);
  EXPECT_EQ(lost.WaitFor("killed"),
            Str("worker 1 (process ", before[1], ") was killed by signal 9"));
  EXPECT_NE(log.WaitFor("started again"), "");
  const std::string& address = (*started)->addresses()[1];
  EXPECT_NE(log.WaitFor("worker 1: listening on " + address, 2), "");
  const std::vector<pid_t> after = (*started)->processes();
  EXPECT_EQ(after[0], before[0]);
  EXPECT_NE(after[1], before[1]);
  // One that hangs.
  kill(after[1], SIGSTOP);
  (*started)->Kill((*started)->addresses()[1]);
  EXPECT_NE(log.WaitFor("worker 1: listening on " + address, 3), "");
  EXPECT_TRUE(Gone(after[1]));
  EXPECT_EQ((*started)->processes()[0], before[0]);
}

TEST_F(Supervisor, WithoutRestartItSaysWhatHappenedAndNoMore) {
  WorkerSupervisor::Options options =
      Workers(kListen + "if [ $6 = no ]; then exit 3; fi\nwhile true; do sleep 0.05; done\n",
              {{"yes"}, {"yes"}});
  options.restart = false;
  auto started = WorkerSupervisor::Start(std::move(options));
  ASSERT_TRUE(started.ok()) << started.status();
  const pid_t victim = (*started)->processes()[0];
  kill(victim, SIGTERM);
  EXPECT_EQ(lost.WaitFor("worker 0"),
            Str("worker 0 (process ", victim, ") was killed by signal 15"));
  EXPECT_EQ((*started)->processes()[0], -1);
  started->reset();
  EXPECT_EQ(lost.lines().size(), 1u);
}

TEST_F(Supervisor, OneThatCannotBeStartedSaysWhy) {
  const auto failed = WorkerSupervisor::Start(
      Workers("if [ $6 = bad ]; then echo 'first'; echo 'no such model'; exit 2; fi\n" + kServe,
              {{"good"}, {"bad"}}));
  ASSERT_FALSE(failed.ok());
  EXPECT_THAT(std::string(failed.status().message()),
              HasSubstr("worker 1 could not be started: it (process "));
  EXPECT_THAT(std::string(failed.status().message()),
              HasSubstr("ended with exit code 2: no such model"));
  EXPECT_THAT(lost.lines(), IsEmpty());
  WorkerSupervisor::Options absent = Workers("", {{}});
  absent.program = "/no/such/program";
  EXPECT_THAT(std::string(WorkerSupervisor::Start(absent).status().message()),
              HasSubstr("cannot be started: No such file or directory"));
}

TEST_F(Supervisor, OneThatNeverListensIsGivenUp) {
  WorkerSupervisor::Options options = Workers("while true; do sleep 0.05; done\n", {{}});
  options.start_timeout = milliseconds(200);
  const auto failed = WorkerSupervisor::Start(std::move(options));
  EXPECT_EQ(failed.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(failed.status().message()), HasSubstr("do not listen after 200 ms"));
}

// SIGTERM is not enough for one that ignores it or is stopped.
TEST_F(Supervisor, TheStubbornEndToo) {
  WorkerSupervisor::Options options = Workers("trap '' TERM\n" + kServe, {{}, {}});
  options.stop_timeout = milliseconds(100);
  auto started = WorkerSupervisor::Start(std::move(options));
  ASSERT_TRUE(started.ok()) << started.status();
  const std::vector<pid_t> processes = (*started)->processes();
  kill(processes[1], SIGSTOP);
  started->reset();
  for (const pid_t process : processes) EXPECT_TRUE(Gone(process));
}

}  // namespace
}  // namespace treadle
