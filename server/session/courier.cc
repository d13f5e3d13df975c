#include "server/session/courier.h"

#include <utility>

namespace treadle {

Courier::Courier() : thread_([this] { Run(); }) {}

Courier::~Courier() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    news_.NotifyOne();
  }
  thread_.join();
}

void Courier::Post(std::shared_ptr<Recipient> recipient) {
  if (recipient->posted_.exchange(true)) return;
  MutexLock lock(mutex_);
  posted_.push_back(std::move(recipient));
  if (posted_.size() == 1) news_.NotifyOne();
}

void Courier::WakeAt(TimePoint when, const std::shared_ptr<Recipient>& recipient) {
  if (recipient->alarmed_.exchange(true)) return;
  MutexLock lock(mutex_);
  const bool first = alarms_.empty() || when < alarms_.begin()->first;
  alarms_.emplace(when, recipient);
  if (first) news_.NotifyOne();
}

void Courier::Run() {
  std::vector<std::shared_ptr<Recipient>> posted;
  std::vector<std::shared_ptr<Recipient>> due;
  while (true) {
    {
      MutexLock lock(mutex_);
      while (posted_.empty() && !stopping_) {
        if (alarms_.empty()) {
          news_.Wait(mutex_);
        } else if (std::chrono::steady_clock::now() >= alarms_.begin()->first ||
                   !news_.WaitUntil(mutex_, alarms_.begin()->first)) {
          break;
        }
      }
      if (posted_.empty() && stopping_) return;
      posted.swap(posted_);
      const TimePoint now = std::chrono::steady_clock::now();
      while (!alarms_.empty() && alarms_.begin()->first <= now) {
        if (auto recipient = alarms_.begin()->second.lock()) due.push_back(std::move(recipient));
        alarms_.erase(alarms_.begin());
      }
    }
    for (auto& recipient : posted) {
      recipient->posted_.store(false);  // before Deliver: news that come meanwhile post again
      recipient->Deliver();
    }
    for (auto& recipient : due) {
      recipient->alarmed_.store(false);  // before OnAlarm, which may ask for another one
      recipient->OnAlarm();
    }
    posted.clear();
    due.clear();
  }
}

}  // namespace treadle
