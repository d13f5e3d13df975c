// Common parts of serve and worker, programs that stay: the signals that end them, where
// their log goes, and, with drain-worker, whom the control plane trusts.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "engine/remote/control_streams.h"
#include "server/observe/log.h"

namespace CLI {
class App;
}

namespace treadle {

// SIGTERM and SIGINT as something to wait for.
//
// Thread safety: construct before any other thread starts, so that all inherit the mask; Wait from
// one thread; Interrupt from any.
class Signals {
 public:
  // Blocks both signals in this thread and those that it starts. Ignores SIGPIPE; and SIGHUP, which
  // programs that rotate logs like to send, and a terminal that closes: a process that is started
  // from here ignores it, too.
  Signals();
  ~Signals();

  // The signal that came, or 0 after Interrupt, or kReadable: `fd`, if there is one, can be read.
  static constexpr int kReadable = -1;
  int Wait(int fd = -1);
  void Interrupt();

 private:
  int signal_fd_;
  int event_fd_;
};

// While it lives, SIGTERM and SIGINT end the process at once, with exit code 0 and the log's event
// `stopped`: for the time in which there is nothing to drain yet, whatever other threads do.
// `signals` and `log` outlive it, and nobody else waits for the former meanwhile.
class EndOnSignal {
 public:
  EndOnSignal(Signals& signals, Log& log);
  ~EndOnSignal();

 private:
  Signals& signals_;
  std::thread thread_;
};

// --log-format, --log-level and --log-file, named as serve's.
void AddLogFlags(CLI::App& app, Log::Options& options);
// --control-tls and --control-secret-file, for OpenControlCredentials.
void AddControlFlags(CLI::App& app, std::string& folder, std::string& secret_file);

// The control plane's mutual TLS from one folder, as Kubernetes mounts a TLS secret: tls.crt,
// tls.key and ca.crt. Everybody in it, master and workers, shows a certificate of that CA, and is
// called by a name that stands in it. Null credentials for an empty `folder`.
//
// Checks the files and watches them as long as the credentials are held; they must be held as long
// as they are used. The secret of `secret_file` (control_secret.h), none if that is empty, is read
// once. Thread safety: as Tls.
absl::StatusOr<ControlCredentials> OpenControlCredentials(const std::string& folder,
                                                          const std::string& secret_file,
                                                          LogSink log);

}  // namespace treadle
