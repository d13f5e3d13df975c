// The server's log: takes events from any thread, and writes them as lines from a thread of its
// own, to stderr or a file.
//
// Write never waits for a disk, a pipe or a terminal. Events queue up to a number of bytes; what
// comes when the queue is full is dropped and counted, as are lines that cannot be written. Once
// there is room again, a line says how many are missing (event log_lines_dropped). A file that
// cannot be written is reported once, on stderr, and tried again with every line.
//
// Thread safety: all methods from any thread; destruction after everything that writes.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/observe/log_event.h"

namespace treadle {

class Log {
 public:
  struct Options {
    LogFormat format = LogFormat::kText;
    Severity level = Severity::kInfo;  // and above
    std::string file = {};             // empty: `standard`
    int standard = 2;                  // stderr; for tests another one
    int64_t queue_bytes = 4 << 20;
    std::chrono::milliseconds flush_timeout{2000};  // at destruction
  };

  // InvalidArgument names the file, if it cannot be opened.
  static absl::StatusOr<std::unique_ptr<Log>> Open(const Options& options);
  // Writes what is queued, for at most flush_timeout: a thread that hangs in the system is left
  // behind.
  ~Log();

  // Strings longer than 4 KiB are cut.
  void Write(LogEvent event);
  // This log as a sink; must outlive it.
  LogSink sink() {
    return [this](LogEvent event) { Write(std::move(event)); };
  }

  // Waits until all that was written before has come out or was dropped; false if `timeout` passed
  // first.
  bool Flush(std::chrono::milliseconds timeout);

  // Lines that nobody will see, since it was opened.
  uint64_t dropped() const;

  const Options& options() const;

 private:
  struct State;
  explicit Log(std::shared_ptr<State> state) : state_(std::move(state)) {}

  const std::shared_ptr<State> state_;  // also the thread's
};

// A sink for commands that are no servers: warnings and errors, as text on stderr.
LogSink WarningsToStderr();

}  // namespace treadle
