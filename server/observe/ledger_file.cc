#include "server/observe/ledger_file.h"

#include <utility>

#include "base/status.h"
#include "base/sync.h"

namespace treadle {

// Tells the log; nobody, once the file is closed: a thread that was left behind may wake up later
// than the log ends.
struct LedgerFile::Teller {
  explicit Teller(LogSink sink) : log(std::move(sink)) {}

  void Failed(const std::string& path, const std::string& reason) ABSL_LOCKS_EXCLUDED(mutex) {
    MutexLock lock(mutex);
    if (!log || std::exchange(failing, true)) return;
    log({.severity = Severity::kWarning,
         .name = "ledger_file_failed",
         .message = Str(reason, "; records are dropped until it can be written"),
         .fields = {{"file", path}}});
  }
  void Resumed(const std::string& path, int64_t missing) ABSL_LOCKS_EXCLUDED(mutex) {
    MutexLock lock(mutex);
    failing = false;
    if (!log) return;
    log({.name = "ledger_file_resumed",
         .message =
             Str("ledger file '", path, "' is written again; ", missing, " records were dropped"),
         .fields = {{"file", path}, {"records", missing}}});
  }

  Mutex mutex;
  LogSink log ABSL_GUARDED_BY(mutex);
  bool failing ABSL_GUARDED_BY(mutex) = false;
};

absl::StatusOr<std::unique_ptr<LedgerFile>> LedgerFile::Open(const std::string& path, LogSink log) {
  const auto teller = std::make_shared<Teller>(std::move(log));
  LineWriter::Options options{.file = path,
                              .what = "ledger file",
                              .mode = 0666,  // less the umask: it has numbers, no texts
                              .anew = true,
                              .flush_timeout = std::chrono::seconds(1)};
  options.failed = [teller, path](const absl::Status& status) {
    teller->Failed(path, std::string(status.message()));
    return "";
  };
  options.resumed = [teller, path](int64_t missing) { teller->Resumed(path, missing); };
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<LineWriter> lines, LineWriter::Open(std::move(options)));
  return std::unique_ptr<LedgerFile>(new LedgerFile(path, teller, std::move(lines)));
}

void LedgerFile::Write(const LedgerRecord& record) {
  ++records_;
  if (lines_->Write(Ledger::ToJson(record) + "\n")) return;
  teller_->Failed(path_, Str("ledger file '", path_, "' does not keep up"));
}

LedgerFile::~LedgerFile() {
  const auto missing = static_cast<int64_t>(lines_->Close());
  MutexLock lock(teller_->mutex);
  const LogSink log = std::exchange(teller_->log, {});
  if (missing == 0) return;
  log({.severity = Severity::kWarning,
       .name = "ledger_file_incomplete",
       .message = Str("ledger file '", path_, "': ", missing, " of ", records_,
                      " records were not written"),
       .fields = {{"file", path_}, {"records", missing}}});
}

}  // namespace treadle
