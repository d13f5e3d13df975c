#include "server/observe/ledger_follower.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr size_t kRecordsAtOnce = 256;

}  // namespace

LedgerFollower::LedgerFollower(Ledger& ledger, std::vector<Sink> sinks)
    : ledger_(ledger), sinks_(std::move(sinks)), bell_(std::make_shared<Bell>()) {
  {
    MutexLock lock(bell_->mutex);
    bell_->observed = ledger.end();
  }
  ledger.AddObserver([bell = bell_](const LedgerRecord&) {
    MutexLock lock(bell->mutex);
    ++bell->observed;
    bell->rung.NotifyOne();
  });
  thread_ = std::thread([this] { Run(); });
}

LedgerFollower::~LedgerFollower() { Stop(); }

void LedgerFollower::Stop() {
  {
    MutexLock lock(bell_->mutex);
    bell_->stopping = true;
    bell_->rung.NotifyOne();
  }
  if (thread_.joinable()) thread_.join();
}

void LedgerFollower::Subscribe(std::weak_ptr<Recipient> recipient) {
  MutexLock lock(mutex_);
  subscribers_.push_back(std::move(recipient));
}

void LedgerFollower::SetCourier(Courier* courier) {
  MutexLock lock(mutex_);
  courier_ = courier;
}

void LedgerFollower::NotifySubscribers() {
  MutexLock lock(mutex_);
  std::erase_if(subscribers_, [&](const std::weak_ptr<Recipient>& weak) {
    auto recipient = weak.lock();
    if (recipient && courier_ != nullptr) courier_->Post(recipient);
    return recipient == nullptr;
  });
}

void LedgerFollower::Run() {
  uint64_t next = ledger_.end();
  while (true) {
    uint64_t observed = 0;
    bool stopping = false;
    {
      MutexLock lock(bell_->mutex);
      while (bell_->observed <= next && !bell_->stopping) bell_->rung.Wait(bell_->mutex);
      observed = bell_->observed;
      stopping = bell_->stopping;
    }
    // The loop rings just before it stores the record.
    if (observed > next) {
      ledger_.WaitFor(observed - 1, Clock::now() + std::chrono::seconds(1));
    }
    Handle(next);
    NotifySubscribers();
    if (stopping) return;
  }
}

void LedgerFollower::Handle(uint64_t& next) {
  while (true) {
    uint64_t lost = 0;
    const auto records = ledger_.Read(next, kRecordsAtOnce, lost);
    if (records.empty()) return;
    for (const auto& record : records) {
      for (const Sink& sink : sinks_) sink(*record, lost);
      lost = 0;
    }
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
