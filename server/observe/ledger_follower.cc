#include "server/observe/ledger_follower.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/status.h"

namespace treadle {

constexpr size_t kRecordsAtOnce = 256;

LedgerFollower::LedgerFollower(Ledger& ledger, std::vector<Sink> sinks)
    : ledger_(ledger),
      sinks_(std::move(sinks)),
      thread_([this, next = ledger.end()] { Run(next); }) {}

LedgerFollower::~LedgerFollower() { Stop(); }

void LedgerFollower::Stop() {
  stopping_ = true;
  ledger_.Wake();
  if (thread_.joinable()) thread_.join();
}

void LedgerFollower::Subscribe(std::function<bool()> tell) {
  MutexLock lock(mutex_);
  subscribers_.push_back(std::move(tell));
}

void LedgerFollower::TellSubscribers() {
  MutexLock lock(mutex_);
  std::erase_if(subscribers_, [](const std::function<bool()>& tell) { return !tell(); });
}

void LedgerFollower::Run(uint64_t next) {
  for (bool last = false; !last;) {
    ledger_.WaitFor(next, Clock::now() + std::chrono::hours(1), &stopping_);
    last = stopping_;
    uint64_t lost = 0;
    while (true) {
      const auto records = ledger_.Read(next, kRecordsAtOnce, lost);
      if (records.empty()) break;
      for (const auto& record : records) {
        for (const Sink& sink : sinks_) sink(*record, lost);
        lost = 0;
      }
    }
    TellSubscribers();
  }
}

absl::StatusOr<LedgerFollower::Sink> OpenLedgerFile(const std::string& path, LogSink log) {
  std::shared_ptr<std::FILE> file(std::fopen(path.c_str(), "w"), [](std::FILE* f) {
    if (f != nullptr) std::fclose(f);
  });
  if (!file) {
    return InvalidArgument("ledger file '", path, "': ", std::strerror(errno),
                           ", expected a file that can be written");
  }
  return LedgerFollower::Sink([file, path, log = std::move(log), failed = false](
                                  const LedgerRecord& record, uint64_t) mutable {
    if (failed) return;
    const std::string line = Ledger::ToJson(record) + "\n";
    if (std::fwrite(line.data(), 1, line.size(), file.get()) != line.size() ||
        std::fflush(file.get()) != 0) {
      failed = true;
      log({.severity = Severity::kError,
           .name = "ledger_file_failed",
           .message = Str("ledger file '", path, "': ", std::strerror(errno), "; it ends here"),
           .fields = {{"file", path}}});
    }
  });
}

}  // namespace treadle
