// Devices and links of ranks on GPUs, with emulated ones (kernels/cuda/emulation), each as large as
// the settings say and with nothing on it.
#pragma once

#include <memory>
#include <utility>

#include "base/status.h"
#include "engine/remote/worker/worker_stage.h"
#include "kernels/backend.h"
#include "kernels/cuda/runtime/backend_on_device.h"
#include "kernels/cuda/runtime/device.h"
#include "tests/support/ranks/forwarding_communicator.h"
#include "tests/support/ranks/thread_groups.h"

namespace treadle {

inline absl::StatusOr<std::unique_ptr<Backend>> EmulatedGpu(int ordinal, DType dtype) {
  TREADLE_ASSIGN_OR_RETURN(auto device, cuda::Device::Open(ordinal));
  return cuda::MakeCudaBackend(std::move(device), {.dtype = dtype, .deterministic = true});
}

// A communicator of threads between emulated devices, in the order of the device's work.
class DeviceLink final : public ForwardingCommunicator {
 public:
  DeviceLink(std::unique_ptr<Communicator> below, cuda::Device& device)
      : ForwardingCommunicator(std::move(below)), device_(device) {}
  absl::Status AllReduce(const float* in, int64_t count, bool accumulate, float* out) override {
    TREADLE_RETURN_IF_ERROR(device_.Synchronize());
    return ForwardingCommunicator::AllReduce(in, count, accumulate, out);
  }
  absl::Status AllGather(const void* in, size_t bytes, void* out) override {
    TREADLE_RETURN_IF_ERROR(device_.Synchronize());
    return ForwardingCommunicator::AllGather(in, bytes, out);
  }
  absl::Status Broadcast(void* data, size_t bytes, int root) override {
    TREADLE_RETURN_IF_ERROR(device_.Synchronize());
    return ForwardingCommunicator::Broadcast(data, bytes, root);
  }
  absl::StatusOr<Transfer> Send(const void* data, size_t bytes, int to) override {
    TREADLE_RETURN_IF_ERROR(device_.Synchronize());
    return ForwardingCommunicator::Send(data, bytes, to);
  }
  absl::StatusOr<Transfer> Recv(void* data, size_t bytes, int from) override {
    TREADLE_RETURN_IF_ERROR(device_.Synchronize());
    return ForwardingCommunicator::Recv(data, bytes, from);
  }

 private:
  cuda::Device& device_;
};

// The GPUs of a worker. Its ranks, and those of neighbouring stages, meet in memory.
inline RankGpus EmulatedGpus(int count) {
  RankGpus gpus;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const cuda::DeviceProperties properties = cuda::Device::Describe(ordinal).value();
    gpus.gpus.push_back({.id = properties.bus_id, .memory_bytes = properties.memory_bytes});
  }
  if (count == 0) gpus.none = "the test has none";
  gpus.create = [](int rank, DType dtype, bool deterministic, int) {
    TREADLE_CHECK(deterministic);
    return EmulatedGpu(rank, dtype);
  };
  gpus.free_bytes = [](int rank) -> absl::StatusOr<uint64_t> {
    TREADLE_ASSIGN_OR_RETURN(const auto properties, cuda::Device::Describe(rank));
    return properties.memory_bytes;
  };
  const auto groups = std::make_shared<ThreadGroups>();
  gpus.join = [groups](const RankJoin& join) -> absl::StatusOr<std::unique_ptr<Communicator>> {
    TREADLE_ASSIGN_OR_RETURN(auto joined, groups->Join(join));
    return std::make_unique<DeviceLink>(std::move(joined), cuda::DeviceOf(join.backend));
  };
  gpus.link = gpus.join;
  gpus.can_link = [] { return absl::OkStatus(); };
  return gpus;
}

}  // namespace treadle
