#include "engine/remote/relayed_rendezvous.h"

#include "base/status.h"

namespace treadle {

absl::Status RelayedRendezvous::Set(const std::string& key, const std::string& bytes) {
  {
    MutexLock lock(mutex_);
    TREADLE_RETURN_IF_ERROR(failed_);
    values_.emplace(key, bytes);
    changed_.NotifyAll();
  }
  send_(key, bytes);
  return absl::OkStatus();
}

absl::StatusOr<std::string> RelayedRendezvous::Get(const std::string& key,
                                                   std::chrono::steady_clock::time_point deadline) {
  MutexLock lock(mutex_);
  while (true) {
    TREADLE_RETURN_IF_ERROR(failed_);
    if (const auto found = values_.find(key); found != values_.end()) return found->second;
    if (std::chrono::steady_clock::now() >= deadline) {
      return absl::DeadlineExceededError(Str("rendezvous: nobody has set '", key, "'"));
    }
    changed_.WaitUntil(mutex_, deadline);
  }
}

void RelayedRendezvous::Deliver(const std::string& key, const std::string& bytes) {
  MutexLock lock(mutex_);
  values_.emplace(key, bytes);
  changed_.NotifyAll();
}

void RelayedRendezvous::Fail(const absl::Status& why) {
  MutexLock lock(mutex_);
  if (failed_.ok()) failed_ = why;
  changed_.NotifyAll();
}

}  // namespace treadle
