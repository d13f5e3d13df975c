// The worker processes that `serve --pipeline-parallel` runs on this machine: started, watched, and
// never left behind.
//
// Each is this program again (`treadle worker`), in a process group of its own, so that a
// terminal's Ctrl-C reaches the server alone, which drains; and dies with the server, whatever ends
// it (--parent). It listens on a socket in a directory that only this user can enter, at the same
// address after a restart. What it logs appears in the server's log behind "worker N: "; lines that
// are no log of JSON are warnings there.
//
// Thread safety: Start and destruction from the owner's thread; the rest from any. Callbacks are
// called on the supervisor's threads and must neither block nor call back.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
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
    std::chrono::milliseconds start_timeout{30'000};  // until a worker listens
    std::chrono::milliseconds stop_timeout{5'000};    // from SIGTERM to SIGKILL
    LogSink log;  // what happens, and what workers say; must not be empty
    // A worker ended that was not told to: "worker 1 (process 4711) was killed by signal 9".
    std::function<void(const std::string&)> lost;
  };

  // Returns when all workers listen. Errors: with the last line of a worker that ended instead.
  static absl::StatusOr<std::unique_ptr<WorkerSupervisor>> Start(Options options);
  // Ends them all and waits until they are gone.
  virtual ~WorkerSupervisor() = default;

  // Each worker's address; constant.
  virtual const std::vector<std::string>& addresses() const = 0;
  // Each worker's process now; -1 while it has none.
  virtual std::vector<pid_t> processes() const = 0;
  // For workers that hang: kills them all; what follows is as if they had ended by themselves.
  virtual void KillAll() = 0;
};

}  // namespace treadle
