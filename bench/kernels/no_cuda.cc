// The measurements that need a GPU, in builds without CUDA.
#include "base/status.h"
#include "bench/kernels/int8_baseline.h"
#include "bench/kernels/machine_peaks.h"

namespace treadle {

absl::StatusOr<MachinePeaks> MeasureCudaPeaks() { return Unimplemented("this build has no CUDA"); }

absl::StatusOr<std::unique_ptr<Int8Baseline>> Int8Baseline::Create(std::span<const MatrixSource>,
                                                                   const ColdProducts::Options&) {
  return Unimplemented("this build has no CUDA");
}

}  // namespace treadle
