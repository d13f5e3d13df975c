#include "engine/kv/kv_events.h"

#include <algorithm>
#include <utility>

namespace treadle {

void KvEventLog::Change(KvBlockEvent event) {
  auto change = std::make_shared<const KvBlockEvent>(std::move(event));
  std::shared_ptr<const Events> outdated;  // released after the lock
  MutexLock lock(mutex_);
  ring_.push_back(std::move(change));
  if (ring_.size() <= capacity_) return;
  ring_.pop_front();
  if (++first_ > taken_at_) outdated = std::move(snapshot_);
}

void KvEventLog::Snapshot(Events held) {
  auto all = std::make_shared<const Events>(std::move(held));
  MutexLock lock(mutex_);
  wanted_ = false;
  snapshot_ = std::move(all);
  taken_at_ = first_ + ring_.size();
}

KvEventLog::Part KvEventLog::Read(Cursor& cursor, size_t most) {
  Part part;
  std::shared_ptr<const Events> read;  // released after the lock
  MutexLock lock(mutex_);
  if (!cursor.began_ || cursor.next_ < first_) {
    read = std::move(cursor.snapshot_);
    cursor.began_ = false;
    if (snapshot_ == nullptr) {
      wanted_ = true;
      return part;
    }
    part.resync = cursor.began_ = true;
    cursor.snapshot_ = snapshot_;
    cursor.read_ = 0;
    cursor.next_ = taken_at_;
  }
  if (cursor.snapshot_ != nullptr) {
    const Events& held = *cursor.snapshot_;
    const size_t end = std::min(held.size(), cursor.read_ + most);
    for (; cursor.read_ < end; ++cursor.read_) part.events.push_back(held[cursor.read_]);
    if (end == held.size()) read = std::move(cursor.snapshot_);
    return part;
  }
  const size_t begin = static_cast<size_t>(cursor.next_ - first_);
  const size_t end = std::min(ring_.size(), begin + most);
  part.events.assign(ring_.begin() + static_cast<ptrdiff_t>(begin),
                     ring_.begin() + static_cast<ptrdiff_t>(end));
  cursor.next_ += part.events.size();
  return part;
}

}  // namespace treadle
