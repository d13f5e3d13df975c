#include "tests/emulation/fault_report.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>

#include "tests/emulation/machine.h"

namespace treadle::simt {
namespace {

// A fiber that ran off its stack cannot run the handler.
thread_local std::array<char, 32 << 10> t_stack;

void Report(int signal, siginfo_t* info, void*) {
  char text[240];
  const int length = std::snprintf(text, sizeof(text),
                                   "emulated kernel, block (%d, %d, %d), thread %d of %d: touched "
                                   "%p, which is not memory of the "
                                   "device (or not aligned, or beyond the thread's stack)\n",
                                   t_here.block[0], t_here.block[1], t_here.block[2], t_here.thread,
                                   t_here.threads, info->si_addr);
  const bool in_kernel = t_here.threads > 0;
  if (in_kernel && length > 0 && write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) {
    _exit(1);
  }
  ::signal(signal, SIG_DFL);  // the access is tried again, and ends the process
}

}  // namespace

void CatchFaults() {
  static thread_local bool done = [] {
    stack_t stack = {};
    stack.ss_sp = t_stack.data();
    stack.ss_size = t_stack.size();
    sigaltstack(&stack, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = &Report;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    return true;
  }();
  (void)done;
}

}  // namespace treadle::simt

#else

namespace treadle::simt {

void CatchFaults() {}

}  // namespace treadle::simt

#endif
