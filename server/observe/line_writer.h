// Writes lines to a file, or to stderr, from a thread of its own: who hands them over never waits
// for a disk, a pipe or a terminal.
//
// Lines queue up to a number of bytes; what comes when the queue is full is dropped and counted, as
// are lines that cannot be written. A file that cannot be written is tried again with every line. A
// line is written whole or, in a file, not at all: a part that came through before a disk was full
// is cut off again. A file that was renamed or removed is opened anew.
//
// Thread safety: all methods from any thread; destruction after everything that writes.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace treadle {

class LineWriter {
 public:
  struct Options {
    std::string file = {};  // empty: `standard`
    std::string what = {};  // what messages call it: "log file"
    int standard = 2;       // stderr; for tests another one
    mode_t mode = 0640;     // of a file that is made
    bool anew = false;      // what the file held when it was opened first goes
    int64_t queue_bytes = 4 << 20;
    std::chrono::milliseconds flush_timeout{2000};  // at destruction

    // All on the writer's thread, which may be left behind: they own what they use. Each may be
    // empty.
    // Writing begins to fail; what it gives goes to `standard`.
    std::function<std::string(const absl::Status&)> failed = {};
    // So many lines are missing; what it gives goes before the next line.
    std::function<std::string(int64_t)> missing = {};
    // So many lines are missing, and now one has come out.
    std::function<void(int64_t)> resumed = {};
  };

  // InvalidArgument names the file, if it cannot be opened.
  static absl::StatusOr<std::unique_ptr<LineWriter>> Open(Options options);
  ~LineWriter();  // Close

  // With its end. False if it was dropped at once: the queue is full, or the writer closed.
  bool Write(std::string line);

  // Waits until all that was written before has come out or was dropped; false if `timeout` passed
  // first.
  bool Flush(std::chrono::milliseconds timeout);

  // Writes what is queued, for at most flush_timeout: a thread that hangs in the system is left
  // behind. Returns, the first time, how many lines never came out, dropped or not. The owner's
  // thread only.
  uint64_t Close();

  // Lines that nobody will see, since it was opened.
  uint64_t dropped() const;

 private:
  struct State;
  explicit LineWriter(std::shared_ptr<State> state) : state_(std::move(state)) {}

  const std::shared_ptr<State> state_;  // also the thread's
};

}  // namespace treadle
