// How ranks in different processes find each other: a small table of keys and bytes that all of
// them can reach. The control plane implements it; it holds addresses only, for one communicator.
//
// Thread safety: all methods from any thread.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/sync.h"

namespace treadle {

class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  // Publishes `bytes` under `key`; a key is set once.
  virtual absl::Status Set(const std::string& key, const std::string& bytes) = 0;
  // Waits until somebody has set `key`. DeadlineExceeded if nobody did; any other error ends the
  // forming of the communicator at once.
  virtual absl::StatusOr<std::string> Get(const std::string& key,
                                          std::chrono::steady_clock::time_point deadline) = 0;
  // Ok, or why the communicator is not wanted any more: who forms it then stops, wherever it waits.
  virtual absl::Status status() = 0;
};

// A part of a rendezvous, so that several communicators can be formed over one: its keys begin with
// a name of their own.
class RendezvousSection final : public Rendezvous {
 public:
  // `whole` outlives it.
  RendezvousSection(Rendezvous& whole, std::string name)
      : whole_(whole), prefix_(std::move(name) + "/") {}

  absl::Status Set(const std::string& key, const std::string& bytes) override {
    return whole_.Set(prefix_ + key, bytes);
  }
  absl::StatusOr<std::string> Get(const std::string& key,
                                  std::chrono::steady_clock::time_point deadline) override {
    return whole_.Get(prefix_ + key, deadline);
  }
  absl::Status status() override { return whole_.status(); }

 private:
  Rendezvous& whole_;
  const std::string prefix_;
};

// A rendezvous of threads.
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
