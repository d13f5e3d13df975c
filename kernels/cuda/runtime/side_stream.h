// Memory that other threads than a rank's fill while its ops run: adapters are loaded so
// (Model::LoadAdapter). Uses a stream of its own, for the rank's may be in a capture.
//
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"
#include "base/sync.h"
#include "kernels/buffer.h"
#include "kernels/cuda/runtime/device.h"

namespace treadle::cuda {

class SideStream {
 public:
  // The stream is opened when it is first needed.
  explicit SideStream(const Device& device) : of_(device) {}

  // As Device's. Errors: also those of OpenBeside.
  absl::StatusOr<Buffer> Allocate(size_t bytes) {
    MutexLock lock(mutex_);
    if (device_ == nullptr) {
      TREADLE_ASSIGN_OR_RETURN(device_, of_.OpenBeside());
    }
    return device_->Allocate(bytes);
  }
  // Done on return. `device` is of an Allocate.
  void CopyToDevice(void* device, const void* host, size_t bytes) {
    MutexLock lock(mutex_);
    TREADLE_CHECK(device_ != nullptr);
    device_->BindThread();
    device_->CopyToDevice(device, host, bytes);
    device_->Synchronize().IgnoreError();
  }
  // The first failure of a copy.
  absl::Status status() {
    MutexLock lock(mutex_);
    return device_ == nullptr ? absl::OkStatus() : device_->status();
  }

 private:
  const Device& of_;
  Mutex mutex_;
  std::unique_ptr<Device> device_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace treadle::cuda
