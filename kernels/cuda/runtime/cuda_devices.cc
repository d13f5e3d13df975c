// The backend on a device by its number, and which devices there are.
#include "kernels/cuda/runtime/backend_on_device.h"
#include "kernels/cuda/runtime/device.h"

namespace treadle {

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaOptions& options) {
  TREADLE_ASSIGN_OR_RETURN(auto device, cuda::Device::Open(options.device));
  return cuda::MakeCudaBackend(std::move(device), options);
}

std::vector<CudaDevice> CudaDevices(std::string* why) {
  std::vector<CudaDevice> devices;
  const int count = cuda::Device::Count(why);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const auto properties = cuda::Device::Describe(ordinal);
    if (!properties.ok()) {
      *why = std::string(properties.status().message());
      continue;
    }
    devices.push_back({ordinal, properties->name, properties->bus_id, properties->memory_bytes});
  }
  return devices;
}

absl::StatusOr<size_t> CudaFreeBytes(int device) {
  TREADLE_ASSIGN_OR_RETURN(const auto opened, cuda::Device::Open(device));
  return opened->FreeBytes();
}

}  // namespace treadle
