#include "server/cli/daemon.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "base/status.h"
#include "engine/remote/control_secret.h"
#include "server/access/tls.h"
#include "server/cli/command.h"

namespace treadle {
Signals::Signals() {
  for (const int ignored : {SIGPIPE, SIGHUP}) signal(ignored, SIG_IGN);
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

int Signals::Wait(int fd) {
  // poll ignores negative descriptors.
  pollfd sources[] = {{signal_fd_, POLLIN, 0}, {event_fd_, POLLIN, 0}, {fd, POLLIN, 0}};
  while (poll(sources, 3, -1) < 0) {
  }
  if (sources[0].revents == 0 && sources[1].revents == 0) return kReadable;
  if (sources[0].revents == 0) {
    uint64_t interrupts = 0;
    TREADLE_CHECK(read(event_fd_, &interrupts, sizeof interrupts) == sizeof interrupts);
    return 0;
  }
  signalfd_siginfo info;
  TREADLE_CHECK(read(signal_fd_, &info, sizeof info) == sizeof info);
  return static_cast<int>(info.ssi_signo);
}

void Signals::Interrupt() {
  const uint64_t one = 1;
  TREADLE_CHECK(write(event_fd_, &one, sizeof one) == sizeof one);
}

EndOnSignal::EndOnSignal(Signals& signals, Log& log)
    : signals_(signals), thread_([&signals, &log] {
        const int signal = signals.Wait();
        if (signal == 0) return;
        log.Write({.name = "stopped",
                   .message = Str("signal ", signal, ": stopped while loading"),
                   .fields = {{"signal", int64_t{signal}}}});
        log.Flush(std::chrono::milliseconds(100));
        std::quick_exit(0);
      }) {}

EndOnSignal::~EndOnSignal() {
  signals_.Interrupt();
  thread_.join();
}

void AddLogFlags(CLI::App& app, Log::Options& options) {
  AddChoice(app, "--log-format", options.format, kLogFormats,
            "lines of the log: text, or json with time, severity, event and fields");
  AddChoice(app, "--log-level", options.level, kSeverities,
            "least severity that is logged: info, warning or error");
  app.add_option(
      "--log-file", options.file,
      "file that the log is appended to, opened again when it was renamed; without it: stderr");
}

void AddControlFlags(CLI::App& app, std::string& folder, std::string& secret_file) {
  app.add_option("--control-tls", folder,
                 "folder with tls.crt, tls.key and ca.crt, read again when they change: "
                 "mutual TLS between master and workers");
  app.add_option("--control-secret-file", secret_file,
                 "file whose first line is a secret of 16 characters or more; "
                 "master and workers prove to each other that they have the same");
}

absl::StatusOr<ControlCredentials> OpenControlCredentials(const std::string& folder,
                                                          const std::string& secret_file,
                                                          LogSink log) {
  ControlCredentials credentials;
  if (!secret_file.empty()) {
    TREADLE_ASSIGN_OR_RETURN(credentials.secret, ReadControlSecret(secret_file));
  }
  if (folder.empty()) return credentials;
  const TlsFiles files = {
      .certificate = folder + "/tls.crt", .key = folder + "/tls.key", .ca = folder + "/ca.crt"};
  // The channels read the same files, and their log tells what becomes of them.
  TREADLE_ASSIGN_OR_RETURN(credentials.server, OpenSocketTls(files, "h2", [](const LogEvent&) {}));
  TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<Tls> tls, Tls::Open(files, std::move(log)));
  struct Held {
    std::shared_ptr<Tls> tls;
    std::shared_ptr<grpc::ChannelCredentials> credentials = tls->ForChannel();
  };
  const std::shared_ptr<Held> held(new Held{std::move(tls)});
  credentials.channel = {held, held->credentials.get()};
  return credentials;
}

}  // namespace treadle
