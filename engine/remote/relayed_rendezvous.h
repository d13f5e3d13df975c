// The rendezvous of one epoch on a worker: what is set here goes to the master, who passes it on to
// the other workers; what they set arrives through Deliver.
//
// Thread safety: all methods from any thread.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "base/sync.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {

class RelayedRendezvous final : public Rendezvous {
 public:
  // `send` must not block.
  explicit RelayedRendezvous(
      std::function<void(const std::string& key, const std::string& bytes)> send)
      : send_(std::move(send)) {}

  absl::Status Set(const std::string& key, const std::string& bytes) override;
  absl::StatusOr<std::string> Get(const std::string& key,
                                  std::chrono::steady_clock::time_point deadline) override;
  absl::Status status() override {
    MutexLock lock(mutex_);
    return failed_;
  }

  void Deliver(const std::string& key, const std::string& bytes);
  // Wakes whoever waits; the first reason stays.
  void Fail(const absl::Status& why);

 private:
  const std::function<void(const std::string&, const std::string&)> send_;
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace treadle
