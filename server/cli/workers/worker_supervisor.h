// The worker processes that `serve --pipeline-parallel` runs on this machine: started, watched, and
// never left behind.
//
// Each is this program again (`treadle worker`), in a process group of its own, so that a
// terminal's Ctrl-C reaches the server alone, which drains; and dies with the server, whatever ends
// it (--parent). It listens on a socket in a folder that only this user can enter, at the same
// address after a restart. Its log appears in the server's log behind "worker N: "; lines that
// are no log of JSON are warnings there. Start removes the folders of servers that were killed.
//
// Thread safety: Start and destruction from the owner's thread; the rest from any. The log is
// written to on the supervisor's threads, and must neither block nor call back.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "server/cli/workers/socket_folder.h"
#include "server/observe/log_event.h"

namespace treadle {

// How the line begins in which a worker says that it listens, and where.
inline constexpr char kWorkerListensOn[] = "listening on ";

class WorkerSupervisor {
 public:
  struct Options {
    std::string program = "/proc/self/exe";
    // One per worker: what follows `treadle worker`, less --listen and --parent.
    std::vector<std::vector<std::string>> arguments;
    bool restart = true;  // one that ended by itself is started again, after a growing pause
    // Each has --memory, a file whose contents the next one in its place finds again, if this one
    // was killed (by SIGKILL or SIGTERM): one that crashed may have written anything.
    bool keep_memory = false;
    std::chrono::milliseconds start_timeout{30'000};  // until a worker listens
    std::chrono::milliseconds stop_timeout{5'000};    // from SIGTERM to SIGKILL
    LogSink log;  // what happens, and what workers say; must not be empty
  };

  // Returns when all workers listen. Errors: with the last line of a worker that ended instead.
  static absl::StatusOr<std::unique_ptr<WorkerSupervisor>> Start(Options options);
  // Ends them all and waits until they are gone.
  ~WorkerSupervisor();

  // Each worker's address; constant.
  const std::vector<std::string>& addresses() const { return addresses_; }
  // Each worker's process now; -1 while it has none.
  std::vector<pid_t> processes() const ABSL_LOCKS_EXCLUDED(mutex_);
  // For one that hangs; what follows is as if it had ended by itself, but that the log says why.
  void Kill(const std::string& address, const std::string& why) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Child {
    std::vector<std::string> arguments;
    int memory = -1;         // a file descriptor
    pid_t process = -1;      // not reaped yet
    bool listening = false;  // this process of it
    std::string last_line;
    std::string killed;   // why this process of it was, by Kill
    std::string failure;  // why it could not be started the first time
  };

  explicit WorkerSupervisor(Options options) : options_(std::move(options)) {}
  absl::Status StartAll() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status MakeFolder();
  absl::Status WaitUntilListening() ABSL_LOCKS_EXCLUDED(mutex_);
  void SignalAll(int signal) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The body of the thread of one worker.
  void Watch(size_t worker) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<int> Spawn(size_t worker) ABSL_LOCKS_EXCLUDED(mutex_);
  void ReadOutput(size_t worker, int pipe) ABSL_LOCKS_EXCLUDED(mutex_);
  void HandleLine(size_t worker, const std::string& line) ABSL_LOCKS_EXCLUDED(mutex_);
  std::string Reap(size_t worker) ABSL_LOCKS_EXCLUDED(mutex_);
  // Says that it ended; false if it is not to be started again.
  bool HandleEnd(size_t worker, const std::string& how) ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;

  // Constant after StartAll.
  std::unique_ptr<SocketFolder> folder_;
  std::vector<std::string> addresses_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Child> children_ ABSL_GUARDED_BY(mutex_);
  bool started_ ABSL_GUARDED_BY(mutex_) = false;  // all were listening once
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::vector<std::thread> threads_;
};

}  // namespace treadle
