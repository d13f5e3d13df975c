// The iteration ledger as a file, one JSON line per record, by a LineWriter: the follower, whose
// thread also feeds the metrics, never waits for the disk.
//
// Records that cannot be written are dropped and counted. The log hears of it when that begins
// (ledger_file_failed), when a record has come out again (ledger_file_resumed), and at the end
// (ledger_file_incomplete).
//
// Thread safety: Write from one thread; dropped from any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "scheduler/ledger.h"
#include "server/observe/line_writer.h"
#include "server/observe/log_event.h"

namespace treadle {

class LedgerFile {
 public:
  // The file begins empty. An error names it. `log` must outlive what this gives.
  static absl::StatusOr<std::unique_ptr<LedgerFile>> Open(const std::string& path, LogSink log);
  // The file gets a second to take what is queued.
  ~LedgerFile();

  void Write(const LedgerRecord& record);

  // Records that nobody will find in it, since it was opened.
  uint64_t dropped() const { return lines_->dropped(); }

 private:
  struct Teller;
  LedgerFile(std::string path, std::shared_ptr<Teller> teller, std::unique_ptr<LineWriter> lines)
      : path_(std::move(path)), teller_(std::move(teller)), lines_(std::move(lines)) {}

  const std::string path_;
  const std::shared_ptr<Teller> teller_;  // also the writer's thread's
  const std::unique_ptr<LineWriter> lines_;
  uint64_t records_ = 0;
};

}  // namespace treadle
