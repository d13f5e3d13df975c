// The checks that a Device makes while the host waits (Device::WatchWaits): for its
// implementations.
#pragma once

#include <limits>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "kernels/cuda/runtime/device.h"

namespace treadle::cuda {

// Thread safety: the rank's thread.
class WaitWatch {
 public:
  void Set(const void* owner, Device::WaitCheck look) {
    if (look) {
      checks_[owner] = std::move(look);
    } else {
      checks_.erase(owner);
    }
  }
  bool empty() const { return checks_.empty(); }

  // The first error. After it, every check has been told that the wait will not end.
  absl::Status Look(double seconds) const {
    for (const auto& [owner, look] : checks_) {
      absl::Status status = look(seconds);
      if (status.ok()) continue;
      for (const auto& [other, end] : checks_) {
        end(std::numeric_limits<double>::infinity()).IgnoreError();  // each knows its own reason
      }
      return status;
    }
    return absl::OkStatus();
  }

 private:
  std::map<const void*, Device::WaitCheck> checks_;
};

}  // namespace treadle::cuda
