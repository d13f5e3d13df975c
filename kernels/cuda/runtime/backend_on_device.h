// The CUDA backend on a device that somebody else opened: a GPU, or the emulation. Private to this
// folder and to tests.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/runtime/device.h"

namespace treadle::cuda {

// Errors: options out of range, or no memory for what every backend has. `options.device` is not
// looked at.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(std::unique_ptr<Device> device,
                                                         const CudaOptions& options);

// The device of a backend from above.
Device& DeviceOf(Backend& backend);

// Backend::PaddedRows without limits: 1, 2, 4, 8, then multiples of 8 up to 64, of 16 up to 256, of
// 32 up to 1024, of 128 beyond. From 17 rows on less than a third is padding, and batches of up to
// 256 rows have 23 shapes.
int64_t PaddedRowBucket(int64_t rows);

}  // namespace treadle::cuda
