// Ways in which a process is lost, for tests that draw one at random. A process that exits with a
// code of its own: tests/server/cli/worker_supervisor_test.cc.
#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

namespace treadle {

struct ProcessLoss {
  const char* name;
  void (*happen)(pid_t process);
};

inline constexpr ProcessLoss kProcessLosses[] = {
    {"killed", [](pid_t process) { kill(process, SIGKILL); }},
    {"terminated", [](pid_t process) { kill(process, SIGTERM); }},
    {"stopped", [](pid_t process) { kill(process, SIGSTOP); }},
    {"aborted", [](pid_t process) { kill(process, SIGABRT); }},
    {"crashed", [](pid_t process) { kill(process, SIGSEGV); }},
    {"cut off from its file", [](pid_t process) { kill(process, SIGBUS); }},
    // The next allocation that asks the system ends it.
    {"out of memory",
     [](pid_t process) {
       const rlimit nothing = {0, RLIM_INFINITY};
       prlimit(process, RLIMIT_AS, &nothing, nullptr);
       prlimit(process, RLIMIT_DATA, &nothing, nullptr);
     }},
};

}  // namespace treadle
