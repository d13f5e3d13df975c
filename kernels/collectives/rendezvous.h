// How ranks in different processes find each other: a small table of keys and bytes that all of
// them can reach. The control plane implements it; it holds addresses only, for one communicator.
//
// Thread safety: all methods from any thread.
#pragma once

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

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

}  // namespace treadle
