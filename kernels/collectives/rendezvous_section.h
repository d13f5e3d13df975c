// A part of a rendezvous, so that several communicators can be formed over one: its keys begin with
// a name of their own. Thread safety: as the whole.
#pragma once

#include <string>
#include <utility>

#include "kernels/collectives/rendezvous.h"

namespace treadle {

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

}  // namespace treadle
