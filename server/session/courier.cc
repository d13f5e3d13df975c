#include "server/session/courier.h"

#include <utility>

namespace treadle {

void Courier::Post(std::shared_ptr<Recipient> recipient) {
  if (recipient->posted_.exchange(true)) return;
  MutexLock lock(mutex_);
  posted_.push_back(std::move(recipient));
  if (posted_.size() == 1) pulse_.Nudge();
}

void Courier::WakeAt(TimePoint when, const std::shared_ptr<Recipient>& recipient) {
  if (recipient->alarmed_.exchange(true)) return;
  MutexLock lock(mutex_);
  const bool first = alarms_.empty() || when < alarms_.begin()->first;
  alarms_.emplace(when, recipient);
  if (first) pulse_.Nudge();
}

Courier::TimePoint Courier::Deliver() {
  TimePoint next = PulseThread::kNever;
  {
    MutexLock lock(mutex_);
    delivered_.swap(posted_);
    const TimePoint now = std::chrono::steady_clock::now();
    while (!alarms_.empty() && alarms_.begin()->first <= now) {
      if (auto recipient = alarms_.begin()->second.lock()) due_.push_back(std::move(recipient));
      alarms_.erase(alarms_.begin());
    }
    if (!alarms_.empty()) next = alarms_.begin()->first;
  }
  for (auto& recipient : delivered_) {
    recipient->posted_.store(false);  // before Deliver: news that come meanwhile post again
    recipient->Deliver();
  }
  for (auto& recipient : due_) {
    recipient->alarmed_.store(false);  // before OnAlarm, which may ask for another one
    recipient->OnAlarm();
  }
  delivered_.clear();
  due_.clear();
  return next;
}

}  // namespace treadle
