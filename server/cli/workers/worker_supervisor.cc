#include "server/cli/workers/worker_supervisor.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr auto kFirstPause = std::chrono::milliseconds(10);
constexpr auto kMaxPause = std::chrono::milliseconds(5'000);
constexpr auto kHealthy = std::chrono::seconds(1);  // after so long the pause is short again

// The newest folder of sockets, for a process that ends without destructors (quick_exit).
std::atomic<const SocketFolder*> newest_folder = nullptr;

void RemoveNewestFolder() {
  std::error_code ignored;
  if (const SocketFolder* folder = newest_folder) {
    std::filesystem::remove_all(folder->path(), ignored);
  }
}

constexpr int kMemory = STDERR_FILENO + 1;  // in a worker

// An attribute and a list of actions for posix_spawn.
class SpawnSettings {
 public:
  // stdout and stderr go to `output`, `memory` is kMemory unless it is -1, nothing else is
  // inherited; signals as at a program's start.
  SpawnSettings(int output, int memory) {
    posix_spawn_file_actions_init(&actions_);
    posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions_, output, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions_, output, STDERR_FILENO);
    if (memory >= 0) posix_spawn_file_actions_adddup2(&actions_, memory, kMemory);
    posix_spawn_file_actions_addclosefrom_np(&actions_, memory >= 0 ? kMemory + 1 : kMemory);
    posix_spawnattr_init(&attributes_);
    sigset_t set;
    sigemptyset(&set);
    posix_spawnattr_setsigmask(&attributes_, &set);
    for (const int signal : {SIGPIPE, SIGTERM, SIGINT}) sigaddset(&set, signal);
    posix_spawnattr_setsigdefault(&attributes_, &set);
    posix_spawnattr_setpgroup(&attributes_, 0);
    posix_spawnattr_setflags(
        &attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  }
  ~SpawnSettings() {
    posix_spawn_file_actions_destroy(&actions_);
    posix_spawnattr_destroy(&attributes_);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  const posix_spawn_file_actions_t* actions() const { return &actions_; }
  const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerSupervisor>> WorkerSupervisor::Start(Options options) {
  std::unique_ptr<WorkerSupervisor> supervisor(new WorkerSupervisor(std::move(options)));
  TREADLE_RETURN_IF_ERROR(supervisor->StartAll());
  return supervisor;
}

WorkerSupervisor::~WorkerSupervisor() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
    SignalAll(SIGTERM);
    const auto patience = SteadyClock::now() + options_.stop_timeout;
    const auto alive = [](const Child& child) { return child.process > 0; };
    while (std::any_of(children_.begin(), children_.end(), alive)) {
      if (!changed_.WaitUntil(mutex_, patience)) break;
    }
    SignalAll(SIGKILL);
  }
  for (std::thread& thread : threads_) thread.join();
  for (const Child& child : children_) {
    if (child.memory >= 0) close(child.memory);
  }
  const SocketFolder* mine = folder_.get();
  newest_folder.compare_exchange_strong(mine, nullptr);
}

std::vector<pid_t> WorkerSupervisor::processes() const {
  MutexLock lock(mutex_);
  std::vector<pid_t> processes;
  for (const Child& child : children_) processes.push_back(child.process);
  return processes;
}

void WorkerSupervisor::Kill(const std::string& address, const std::string& why) {
  const auto worker = std::ranges::find(addresses_, address) - addresses_.begin();
  MutexLock lock(mutex_);
  Child& child = children_[worker];
  if (child.process <= 0) return;
  kill(child.process, SIGKILL);
  child.killed = why;
}

void WorkerSupervisor::SignalAll(int signal) {
  for (const Child& child : children_) {
    if (child.process > 0) kill(child.process, signal);
  }
}

absl::Status WorkerSupervisor::MakeFolder() {
  std::error_code error;
  const std::filesystem::path parent = std::filesystem::temp_directory_path(error);
  if (error) {
    return absl::UnavailableError(
        Str("no temporary folder for the workers' sockets: ", error.message()));
  }
  for (const std::string& path : SocketFolder::RemoveAbandoned(parent)) {
    options_.log({.name = "sockets_removed",
                  .message = "removed the sockets of a server that was killed: " + path,
                  .fields = {{"folder", path}}});
  }
  TREADLE_ASSIGN_OR_RETURN(folder_, SocketFolder::Create(parent));
  static const bool registered = std::at_quick_exit(RemoveNewestFolder) == 0;
  if (registered) newest_folder = folder_.get();
  return absl::OkStatus();
}

absl::Status WorkerSupervisor::StartAll() {
  TREADLE_RETURN_IF_ERROR(MakeFolder());
  const std::string parent = std::to_string(getpid());
  {
    MutexLock lock(mutex_);
    for (const std::vector<std::string>& own : options_.arguments) {
      addresses_.push_back(Str("unix:", folder_->path(), "/", children_.size()));
      std::vector<std::string> arguments = {"treadle",         "worker",   "--listen",
                                            addresses_.back(), "--parent", parent};
      arguments.insert(arguments.end(), own.begin(), own.end());
      Child& child = children_.emplace_back();
      // Without one its successor computes again.
      if (options_.keep_memory) child.memory = memfd_create("treadle-worker", MFD_CLOEXEC);
      if (child.memory >= 0) arguments.insert(arguments.end(), {"--memory", Str(kMemory)});
      child.arguments = std::move(arguments);
    }
  }
  try {
    for (size_t worker = 0; worker < addresses_.size(); ++worker) {
      threads_.emplace_back([this, worker] { Watch(worker); });
    }
  } catch (const std::system_error& error) {
    return ResourceExhausted("thread of a worker's supervisor: ", error.what());
  }
  return WaitUntilListening();
}

absl::Status WorkerSupervisor::WaitUntilListening() {
  const auto patience = SteadyClock::now() + options_.start_timeout;
  MutexLock lock(mutex_);
  while (true) {
    bool all = true;
    for (size_t worker = 0; worker < children_.size(); ++worker) {
      const Child& child = children_[worker];
      if (!child.failure.empty()) {
        return absl::UnavailableError(Str("worker ", worker, " could not be started: it ",
                                          child.failure, child.last_line.empty() ? "" : ": ",
                                          child.last_line));
      }
      all = all && child.listening;
    }
    if (all) break;
    if (!changed_.WaitUntil(mutex_, patience)) {
      return absl::DeadlineExceededError(
          Str("the workers do not listen after ", options_.start_timeout.count(), " ms"));
    }
  }
  started_ = true;
  return absl::OkStatus();
}

void WorkerSupervisor::Watch(size_t worker) {
  auto pause = kFirstPause;
  while (true) {
    const auto began = SteadyClock::now();
    std::string how;
    if (const absl::StatusOr<int> pipe = Spawn(worker); pipe.ok()) {
      ReadOutput(worker, *pipe);
      close(*pipe);
      how = Reap(worker);
    } else {
      how = std::string(pipe.status().message());
    }
    if (!HandleEnd(worker, how)) return;
    if (SteadyClock::now() - began > kHealthy) pause = kFirstPause;
    const auto next = SteadyClock::now() + pause;
    pause = std::min(2 * pause, kMaxPause);
    MutexLock lock(mutex_);
    while (!stopping_ && changed_.WaitUntil(mutex_, next)) {
    }
    if (stopping_) return;
  }
}

absl::StatusOr<int> WorkerSupervisor::Spawn(size_t worker) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return ResourceExhausted("cannot be started: ", std::strerror(errno));
  }
  int error = ECANCELED;
  {
    MutexLock lock(mutex_);
    Child& child = children_[worker];
    std::vector<char*> arguments;
    for (std::string& argument : child.arguments) arguments.push_back(argument.data());
    arguments.push_back(nullptr);
    const SpawnSettings settings(ends[1], child.memory);
    if (!stopping_) {
      error = posix_spawn(&child.process, options_.program.c_str(), settings.actions(),
                          settings.attributes(), arguments.data(), environ);
    }
    if (error != 0) child.process = -1;
  }
  close(ends[1]);
  if (error == 0) return ends[0];
  close(ends[0]);
  return absl::UnavailableError(Str("cannot be started: ", std::strerror(error)));
}

void WorkerSupervisor::ReadOutput(size_t worker, int pipe) {
  std::string text;
  char buffer[4096];
  while (true) {
    const ssize_t n = read(pipe, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    text.append(buffer, static_cast<size_t>(n));
    size_t begin = 0;
    for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
      HandleLine(worker, text.substr(begin, end - begin));
    }
    text.erase(0, begin);
  }
  if (!text.empty()) HandleLine(worker, text);
}

void WorkerSupervisor::HandleLine(size_t worker, const std::string& line) {
  // A line that is no log of JSON is a library's complaint, or the system's.
  LogEvent event = FromJson(line).value_or(
      LogEvent{.severity = Severity::kWarning, .name = "worker_output", .message = line});
  const std::string message = event.message;
  event.message = Str("worker ", worker, ": ", message);
  event.fields.push_back({"worker", static_cast<int64_t>(worker)});
  options_.log(std::move(event));
  MutexLock lock(mutex_);
  Child& child = children_[worker];
  child.last_line = message;
  if (!message.starts_with(kWorkerListensOn)) return;
  child.listening = true;
  changed_.NotifyAll();
}

std::string WorkerSupervisor::Reap(size_t worker) {
  pid_t process;
  {
    MutexLock lock(mutex_);
    process = children_[worker].process;
  }
  siginfo_t info = {};
  while (waitid(P_PID, static_cast<id_t>(process), &info, WEXITED | WNOWAIT) != 0) {
  }
  // The number stays ours until here, so that a signal can hit nobody else.
  MutexLock lock(mutex_);
  waitpid(process, nullptr, 0);
  const bool killed = info.si_status == SIGKILL || info.si_status == SIGTERM;
  if (const int memory = children_[worker].memory;
      memory >= 0 && (info.si_code == CLD_EXITED ? info.si_status != 0 : !killed)) {
    TREADLE_CHECK(ftruncate(memory, 0) == 0);
  }
  const std::string why = std::exchange(children_[worker].killed, {});
  children_[worker].process = -1;
  children_[worker].listening = false;
  changed_.NotifyAll();
  return Str("(process ", process, ") ",
             info.si_code == CLD_EXITED ? "ended with exit code " : "was killed by signal ",
             info.si_status, why.empty() ? "" : Str(", by this server: ", why));
}

bool WorkerSupervisor::HandleEnd(size_t worker, const std::string& how) {
  {
    MutexLock lock(mutex_);
    if (stopping_) return false;
    if (!started_) {
      children_[worker].failure = how;
      changed_.NotifyAll();
      return false;
    }
  }
  options_.log(
      {.severity = Severity::kWarning,
       .name = "worker_lost",
       .message = Str("worker ", worker, " ", how, options_.restart ? "; it is started again" : ""),
       .fields = {{"worker", static_cast<int64_t>(worker)}}});
  return options_.restart;
}

}  // namespace treadle
