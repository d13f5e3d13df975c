// A rendezvous of threads. Thread-safe.
#pragma once

#include <map>
#include <string>

#include "base/status.h"
#include "base/sync.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {

class MemoryRendezvous final : public Rendezvous {
 public:
  absl::Status Set(const std::string& key, const std::string& bytes) override {
    const MutexLock lock(mutex_);
    if (!table_.emplace(key, bytes).second) return Internal(key, " was set twice");
    changed_.NotifyAll();
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Get(const std::string& key,
                                  std::chrono::steady_clock::time_point deadline) override {
    const MutexLock lock(mutex_);
    while (cancelled_.ok() && !table_.contains(key)) {
      if (!changed_.WaitUntil(mutex_, deadline) && cancelled_.ok() && !table_.contains(key)) {
        return absl::DeadlineExceededError(Str("rendezvous: nobody has set '", key, "'"));
      }
    }
    if (!cancelled_.ok()) return cancelled_;
    return table_.at(key);
  }
  absl::Status status() override {
    const MutexLock lock(mutex_);
    return cancelled_;
  }
  // Ends all waits, these and later ones; the first reason stays.
  void Cancel(absl::Status why) {
    const MutexLock lock(mutex_);
    if (cancelled_.ok()) cancelled_ = std::move(why);
    changed_.NotifyAll();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> table_ ABSL_GUARDED_BY(mutex_);
  absl::Status cancelled_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace treadle
