// Backend::staging on a device of kernels/cuda. Thread safety: as Device.
#pragma once

#include "kernels/backend.h"
#include "kernels/cuda/runtime/device.h"

namespace treadle::cuda {

// Page-locked memory.
class PinnedStaging final : public Staging {
 public:
  explicit PinnedStaging(Device& device) : device_(device) {}
  absl::StatusOr<Buffer> Allocate(size_t bytes) override { return device_.AllocateHost(bytes); }
  void Upload(void* device, const void* host, size_t bytes) override {
    device_.CopyToDeviceAsync(device, host, bytes);
  }
  void Download(void* host, const void* device, size_t bytes) override {
    device_.CopyToHostAsync(host, device, bytes);
  }

 private:
  Device& device_;
};

class DeviceStaging final : public Staging {
 public:
  explicit DeviceStaging(Device& device) : device_(device) {}
  absl::StatusOr<Buffer> Allocate(size_t bytes) override { return device_.Allocate(bytes); }
  void Upload(void* device, const void* staged, size_t bytes) override {
    device_.CopyOnDevice(device, staged, bytes);
  }
  void Download(void* staged, const void* device, size_t bytes) override {
    device_.CopyOnDevice(staged, device, bytes);
  }

 private:
  Device& device_;
};

}  // namespace treadle::cuda
