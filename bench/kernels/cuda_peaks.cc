#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bench/kernels/machine_peaks.h"
#include "kernels/cuda/dense/cublas_lt.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/dtype.h"

namespace treadle {
namespace {

constexpr int kTries = 5;
constexpr int kCallsPerTry = 10;

// The least device time of one call, after one to warm up.
template <typename Body>
absl::StatusOr<double> BestSeconds(cuda::Device& device, Body body) {
  body();
  double best = 1e30;
  for (int i = 0; i < kTries; ++i) {
    device.SetMark(0);
    for (int call = 0; call < kCallsPerTry; ++call) body();
    device.SetMark(1);
    TREADLE_RETURN_IF_ERROR(device.Synchronize());
    best = std::min(best, device.Seconds(0, 1) / kCallsPerTry);
  }
  return best;
}

absl::StatusOr<double> CopyGigabytes(cuda::Device& device) {
  constexpr size_t kBytes = size_t{1} << 30;
  TREADLE_ASSIGN_OR_RETURN(const Buffer from, device.Allocate(kBytes));
  TREADLE_ASSIGN_OR_RETURN(const Buffer to, device.Allocate(kBytes));
  cudaError_t error = cudaSuccess;
  TREADLE_ASSIGN_OR_RETURN(const double seconds, BestSeconds(device, [&] {
                             const cudaError_t now = cudaMemcpyAsync(
                                 to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice,
                                 static_cast<cudaStream_t>(device.stream()));
                             if (error == cudaSuccess) error = now;
                           }));
  if (error != cudaSuccess) {
    return absl::InternalError(Str("copy on the device: ", cudaGetErrorString(error)));
  }
  return 2e-9 * static_cast<double>(kBytes) / seconds;
}

// dtype: kBF16, kI8.
absl::StatusOr<double> ProductGigaops(cuda::Device& device, DType dtype) {
  constexpr int64_t kSize = 8192;
  constexpr size_t kElements = size_t{kSize} * kSize;
  std::vector<std::byte> noise(kElements * SizeOf(dtype));
  uint32_t state = 1;
  for (size_t i = 0; i < kElements; ++i) {
    state = state * 1664525u + 1013904223u;
    if (dtype == DType::kI8) {
      noise[i] = static_cast<std::byte>(state >> 24);
    } else {
      const BFloat16 value = ToBFloat16(static_cast<float>(state >> 8) * 0x1p-24f - 0.5f);
      std::memcpy(&noise[i * sizeof(value)], &value, sizeof(value));
    }
  }
  TREADLE_ASSIGN_OR_RETURN(const Buffer weights, device.Allocate(noise.size()));
  TREADLE_ASSIGN_OR_RETURN(const Buffer x, device.Allocate(noise.size()));
  TREADLE_ASSIGN_OR_RETURN(const Buffer out, device.Allocate(kElements * sizeof(float)));
  device.CopyToDevice(weights.data(), noise.data(), noise.size());
  device.CopyToDevice(x.data(), noise.data(), noise.size());
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<cuda::CublasLt> library,
                           cuda::CublasLt::Create(device));
  cuda::LibraryProduct product;
  product.dtype = dtype;
  product.weights = weights.data();
  product.x = x.data();
  product.out = out.data();
  product.weight_stride = product.x_stride = product.out_stride = kSize;
  product.rows = product.n = product.k = kSize;
  bool taken = true;
  TREADLE_ASSIGN_OR_RETURN(const double seconds, BestSeconds(device, [&] {
                             taken = library->Multiply(product) && taken;
                           }));
  if (!taken) {
    return absl::InternalError(
        Str("cuBLASLt has no algorithm for a square product of ", Name(dtype)));
  }
  constexpr double kOperations = 2.0 * kSize * kSize * kSize;
  return 1e-9 * kOperations / seconds;
}

}  // namespace

absl::StatusOr<MachinePeaks> MeasureCudaPeaks() {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<cuda::Device> device, cuda::Device::Open(0));
  device->BindThread();
  MachinePeaks peaks;
  TREADLE_ASSIGN_OR_RETURN(peaks.read_gigabytes, CopyGigabytes(*device));
  TREADLE_ASSIGN_OR_RETURN(peaks.float_gigaops, ProductGigaops(*device, DType::kBF16));
  const absl::StatusOr<double> int8 = ProductGigaops(*device, DType::kI8);
  if (int8.ok()) peaks.integer_gigaops = *int8;
  return peaks;
}

}  // namespace treadle
