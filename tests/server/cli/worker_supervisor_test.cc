// The supervisor over real processes that are shell scripts: starting, restarting, ending, and what
// it says when one cannot be started.
#include "server/cli/workers/worker_supervisor.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/status.h"
#include "base/sync.h"
#include "server/cli/workers/socket_folder.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr auto kPatience = seconds(60);

// Words of the supervisor, and something to wait for it with.
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

// A worker's script as long as it is well; $3 is the address it was given.
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
  (*started)->Kill((*started)->addresses()[1], "it hangs");
  EXPECT_EQ(lost.WaitFor("it hangs"), Str("worker 1 (process ", after[1],
                                          ") was killed by signal 9, by this server: it hangs"));
  EXPECT_NE(log.WaitFor("worker 1: listening on " + address, 3), "");
  EXPECT_TRUE(Gone(after[1]));
  EXPECT_EQ((*started)->processes()[0], before[0]);
}

// Memory of a killed process is whole; one that crashed may have written anything.
TEST_F(Supervisor, MemoryIsKeptOfOneThatWasKilledAndEmptiedOfOneThatCrashed) {
  const std::string remember =
      "echo \"found $(stat -L -c %s /proc/self/fd/3) bytes\"; echo some >&3\n";
  const std::string command = testing::TempDir() + "/end-" + std::to_string(getpid());
  WorkerSupervisor::Options options =
      Workers(remember + kListen + "while ! [ -e " + command + " ]; do sleep 0.02; done; rm " +
                  command + "; exit 1\n",
              {{}});
  options.keep_memory = true;
  auto started = WorkerSupervisor::Start(std::move(options));
  ASSERT_TRUE(started.ok()) << started.status();
  EXPECT_NE(log.WaitFor("found 0 bytes"), "");
  int starts = 1, empty = 1;
  const auto expect = [&](const char* how, bool kept) {
    log.WaitFor("listening on", ++starts);
    EXPECT_NE(log.WaitFor("found", starts), "") << how;
    if (!kept) ++empty;
    int found_empty = 0;
    for (const std::string& line : log.lines()) {
      if (line.ends_with("found 0 bytes")) ++found_empty;
    }
    EXPECT_EQ(found_empty, empty) << how;
  };
  for (const int signal : {SIGKILL, SIGABRT, SIGTERM, SIGSEGV, SIGBUS, SIGKILL}) {
    kill((*started)->processes()[0], signal);
    expect(strsignal(signal), signal == SIGKILL || signal == SIGTERM);
  }
  std::ofstream(command) << "now";
  expect("exit code 1", false);
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

// -- folders of sockets ---------------------------------------------------------------------------

namespace fs = std::filesystem;

// A temporary folder of the test's own.
class SocketFolders : public Supervisor {
 protected:
  SocketFolders() {
    fs::create_directories(parent);
    setenv("TMPDIR", parent.c_str(), 1);
  }
  ~SocketFolders() override {
    unsetenv("TMPDIR");
    fs::remove_all(parent);
  }
  // As one that an owner who knew no locks has left.
  fs::path Unlocked(const std::string& name, fs::perms permissions = fs::perms::owner_all) {
    const fs::path path = parent / name;
    fs::create_directory(path);
    fs::permissions(path, permissions);
    return path;
  }
  // So that it is old.
  static void MakeOld(const fs::path& path) {
    const timespec times[] = {{.tv_sec = 1, .tv_nsec = 0}, {.tv_sec = 1, .tv_nsec = 0}};
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW), 0);
  }
  // A socket that listens until its descriptor is closed.
  static int Listen(const fs::path& path) {
    sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
    TREADLE_CHECK(path.native().size() < sizeof address.sun_path);
    std::ranges::copy(path.native(), address.sun_path);
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    TREADLE_CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                  listen(listener, 1) == 0);
    return listener;
  }
  static void LeaveSocket(const fs::path& path) { close(Listen(path)); }
  std::vector<std::string> Names() {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(parent)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  const fs::path parent = fs::path("/tmp") / Str("sockets-", getpid());
};

TEST_F(SocketFolders, TheNextStartRemovesThoseOfAKilledOwnerAndNoOthers) {
  // $5 is the owner; a worker of this script does not end with it by itself.
  const std::string script = kListen + "while kill -0 $5; do sleep 0.05; done\n";
  int ready[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  const pid_t owner = fork();
  ASSERT_GE(owner, 0);
  if (owner == 0) {
    const auto started = WorkerSupervisor::Start(Workers(script, {{}}));
    const std::string address = started.ok() ? (*started)->addresses()[0] : "";
    if (write(ready[1], address.data(), address.size()) < 0) _exit(1);
    close(ready[1]);
    while (true) pause();
  }
  close(ready[1]);
  std::string address(200, '\0');
  address.resize(static_cast<size_t>(std::max<ssize_t>(read(ready[0], address.data(), 200), 0)));
  close(ready[0]);
  ASSERT_TRUE(address.starts_with("unix:")) << address;
  const fs::path killed = fs::path(address.substr(5)).parent_path();
  LeaveSocket(address.substr(5));

  auto first = WorkerSupervisor::Start(Workers(script, {{}}));
  ASSERT_TRUE(first.ok()) << first.status();
  const fs::path living = fs::path((*first)->addresses()[0].substr(5)).parent_path();
  MakeOld(living);
  EXPECT_TRUE(fs::exists(killed)) << "its owner lives";
  kill(owner, SIGKILL);
  waitpid(owner, nullptr, 0);

  auto second = WorkerSupervisor::Start(Workers(script, {{}}));
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_FALSE(fs::exists(killed));
  EXPECT_NE(log.WaitFor("removed the sockets of a server that was killed: " + killed.string()), "");
  EXPECT_TRUE(fs::exists(living)) << "its owner lives";
  first->reset();
  second->reset();
  EXPECT_FALSE(fs::exists(living));
}

TEST_F(SocketFolders, WithoutALockTheOldThatNobodyListensInAreRemoved) {
  const fs::path young = Unlocked("treadle-young1"), dead = Unlocked("treadle-dead01"),
                 empty = Unlocked("treadle-empty1"), alive = Unlocked("treadle-alive1");
  LeaveSocket(young / "0");
  LeaveSocket(dead / "0");
  LeaveSocket(dead / "1");
  LeaveSocket(alive / "0");
  const int listener = Listen(alive / "1");
  for (const fs::path& path : {dead, empty, alive}) MakeOld(path);
  EXPECT_THAT(SocketFolder::RemoveAbandoned(parent),
              testing::UnorderedElementsAre(dead.string(), empty.string()));
  EXPECT_THAT(Names(), testing::UnorderedElementsAre("treadle-young1", "treadle-alive1"));
  EXPECT_TRUE(fs::exists(alive / "0"));
  close(listener);
}

// Between the folder and its lock there is a moment.
TEST_F(SocketFolders, OneThatIsBeingMadeIsLeftAlone) {
  const fs::path making = Unlocked("treadle-making");
  std::ofstream(making / "lock.new").flush();
  EXPECT_THAT(SocketFolder::RemoveAbandoned(parent), IsEmpty());
  EXPECT_TRUE(fs::exists(making / "lock.new"));
  MakeOld(making);
  EXPECT_THAT(SocketFolder::RemoveAbandoned(parent), ElementsAre(making.string()));
}

TEST_F(SocketFolders, WhatIsNotOfThisProgramIsLeftAlone) {
  const fs::path elsewhere = parent / "elsewhere";
  fs::create_directory(elsewhere);
  fs::permissions(elsewhere, fs::perms::owner_all);
  LeaveSocket(elsewhere / "0");
  std::ofstream(elsewhere / "lock").flush();
  fs::create_directory_symlink(elsewhere, parent / "treadle-linked");
  std::ofstream(parent / "treadle-afile1").flush();
  for (const fs::path& path :
       {Unlocked("treadle-longer1"), Unlocked("treadle-short"), Unlocked("other-abcdef"),
        Unlocked("treadle-public", fs::perms::owner_all | fs::perms::others_exec)}) {
    std::ofstream(path / "lock").flush();
  }
  for (const char* file : {"notes", "0", "01a"}) {
    const fs::path path = Unlocked(Str("treadle-", file, std::string(6 - Str(file).size(), 'x')));
    std::ofstream(path / "lock").flush();
    std::ofstream(path / file).flush();
  }
  const fs::path link = Unlocked("treadle-lnklck");
  std::ofstream(parent / "target").flush();
  fs::create_symlink(parent / "target", link / "lock");
  const fs::path inner = Unlocked("treadle-folder");
  std::ofstream(inner / "lock").flush();
  fs::create_directory(inner / "0");
  const std::vector<std::string> before = Names();
  for (const std::string& name : before) MakeOld(parent / name);
  EXPECT_THAT(SocketFolder::RemoveAbandoned(parent), IsEmpty());
  EXPECT_THAT(Names(), testing::UnorderedElementsAreArray(before));
  EXPECT_TRUE(fs::exists(elsewhere / "0"));
  EXPECT_TRUE(fs::exists(parent / "target"));
}

}  // namespace
}  // namespace treadle
