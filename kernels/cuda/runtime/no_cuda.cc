// Stands in for the CUDA backend in builds without it.
#include "base/status.h"
#include "kernels/cuda/cuda_backend.h"

namespace treadle {
namespace {

constexpr char kWhy[] =
    "this build has no CUDA: nvcc was not there when it was configured, or TREADLE_CUDA was OFF";

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaOptions&) {
  return absl::FailedPreconditionError(kWhy);
}

std::vector<CudaDevice> CudaDevices(std::string* why) {
  *why = kWhy;
  return {};
}

absl::StatusOr<size_t> CudaFreeBytes(int) { return absl::FailedPreconditionError(kWhy); }

}  // namespace treadle
