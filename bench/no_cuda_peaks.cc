#include "bench/cuda_peaks.h"
#include "kernels/status.h"

namespace treadle {

absl::StatusOr<MachinePeaks> MeasureCudaPeaks() { return Unimplemented("this build has no CUDA"); }

}  // namespace treadle
