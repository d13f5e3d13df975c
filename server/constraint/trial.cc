#include "server/constraint/trial.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>

#include "base/status.h"

namespace treadle {
namespace {

constexpr rlim_t kTrialSeconds = 4;  // of a processor
constexpr rlim_t kTrialBytes = rlim_t{512} << 20;
constexpr std::chrono::seconds kTrialPatience{20};

// The size of this process's address space.
rlim_t VirtualBytes() {
  std::ifstream pages("/proc/self/statm");
  rlim_t count = 0;
  pages >> count;
  return count * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
}

// Ends this process after `time`, by SIGALRM, whatever it has inherited.
void EndAfter(std::chrono::seconds time) {
  signal(SIGALRM, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGALRM);
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
  alarm(static_cast<unsigned>(time.count()));
}

}  // namespace

absl::Status InTrial(const std::function<void()>& work, const std::string& what) {
  const rlim_t most = VirtualBytes() + kTrialBytes;
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) return absl::UnavailableError(Str("no process to try it in: ", strerror(errno)));
  if (child == 0) {
    // It keeps neither the server's ports and locks nor itself alive once the server is gone.
    close_range(STDERR_FILENO + 1, ~0U, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);  // gone before the call
    struct rlimit used {};
    getrlimit(RLIMIT_AS, &used);
    const rlimit memory{std::min(used.rlim_max, most), used.rlim_max};
    const rlimit seconds{kTrialSeconds, kTrialSeconds};
    const rlimit core{0, 0};
    setrlimit(RLIMIT_AS, &memory);
    setrlimit(RLIMIT_CPU, &seconds);
    setrlimit(RLIMIT_CORE, &core);
    EndAfter(kTrialPatience);
    work();
    _exit(0);
  }
  int how = 0;
  pid_t ended = 0;
  while ((ended = waitpid(child, &how, 0)) < 0 && errno == EINTR) {
  }
  if (ended == child && WIFEXITED(how) && WEXITSTATUS(how) == 0) return absl::OkStatus();
  if (ended == child && WIFSIGNALED(how) && WTERMSIG(how) == SIGALRM) {
    return absl::UnavailableError(Str("its trial did not end within ", kTrialPatience.count(),
                                      " s: the machine is too busy"));
  }
  return InvalidArgument("is too expensive: ", what, ", take more than ", kTrialSeconds,
                         " s of a processor or ", kTrialBytes >> 20, " MiB");
}

}  // namespace treadle
