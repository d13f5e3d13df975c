#include "server/observe/ledger_follower.h"

#include <utility>

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

}  // namespace treadle
