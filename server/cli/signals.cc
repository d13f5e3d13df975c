#include "server/cli/signals.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cstdint>

#include "base/status.h"

namespace treadle {

Signals::Signals() {
  signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal_fd_ = signalfd(-1, &set, SFD_CLOEXEC);
  event_fd_ = eventfd(0, EFD_CLOEXEC);
  TREADLE_CHECK(signal_fd_ >= 0 && event_fd_ >= 0);
}

Signals::~Signals() {
  close(signal_fd_);
  close(event_fd_);
}

int Signals::Wait() {
  pollfd sources[] = {{signal_fd_, POLLIN, 0}, {event_fd_, POLLIN, 0}};
  while (poll(sources, 2, -1) < 0) {
  }
  if (sources[0].revents == 0) return 0;
  signalfd_siginfo info;
  TREADLE_CHECK(read(signal_fd_, &info, sizeof info) == sizeof info);
  return static_cast<int>(info.ssi_signo);
}

void Signals::Interrupt() {
  const uint64_t one = 1;
  TREADLE_CHECK(write(event_fd_, &one, sizeof one) == sizeof one);
}

}  // namespace treadle
