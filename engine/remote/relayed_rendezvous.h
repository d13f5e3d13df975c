// The rendezvous of one epoch on a worker: what is set here goes to the master, who passes it on to
// the other workers; what they set arrives through Deliver.
//
// Thread safety: all methods from any thread.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "kernels/collectives/rendezvous.h"

namespace treadle {

class RelayedRendezvous final : public Rendezvous {
 public:
  // `send` must not block.
  explicit RelayedRendezvous(
      std::function<void(const std::string& key, const std::string& bytes)> send)
      : send_(std::move(send)) {}

  absl::Status Set(const std::string& key, const std::string& bytes) override {
    TREADLE_RETURN_IF_ERROR(status());
    TREADLE_RETURN_IF_ERROR(known_.Set(key, bytes));
    send_(key, bytes);
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Get(const std::string& key,
                                  std::chrono::steady_clock::time_point deadline) override {
    return known_.Get(key, deadline);
  }
  absl::Status status() override { return known_.status(); }

  // What came first stays.
  void Deliver(const std::string& key, const std::string& bytes) {
    known_.Set(key, bytes).IgnoreError();
  }
  // Wakes whoever waits; the first reason stays.
  void Fail(const absl::Status& why) { known_.Cancel(why); }

 private:
  const std::function<void(const std::string&, const std::string&)> send_;
  MemoryRendezvous known_;
};

}  // namespace treadle
