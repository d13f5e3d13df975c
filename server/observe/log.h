// The server's log: takes events from any thread, and has a LineWriter write them as lines, to
// stderr or a file; nothing waits for either. Where lines were dropped, a line says how many (event
// log_lines_dropped). A file that cannot be written is reported once, on stderr.
//
// Thread safety: all methods from any thread; destruction after everything that writes.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/observe/line_writer.h"
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
  // Strings longer than 4 KiB are cut.
  void Write(LogEvent event);
  // This log as a sink; must outlive it.
  LogSink sink() {
    return [this](LogEvent event) { Write(std::move(event)); };
  }

  // Waits until all that was written before has come out or was dropped; false if `timeout` passed
  // first.
  bool Flush(std::chrono::milliseconds timeout) { return lines_->Flush(timeout); }

  // Lines that nobody will see, since it was opened.
  uint64_t dropped() const { return lines_->dropped(); }

  const Options& options() const { return options_; }

 private:
  Log(const Options& options, std::unique_ptr<LineWriter> lines)
      : options_(options), lines_(std::move(lines)) {}

  const Options options_;
  const std::unique_ptr<LineWriter> lines_;
};

// A sink for commands that are no servers: warnings and errors, as text on stderr.
LogSink WarningsToStderr();

}  // namespace treadle
