// The ceilings of a GPU: what its copies and the vendor's library reach.
//
// Thread safety: call from one thread.
#pragma once

#include "absl/status/statusor.h"
#include "bench/kernels/machine_peaks.h"

namespace treadle {

// read_gigabytes: bytes read and written by large copies on the device; float_gigaops: cuBLASLt on
// a large bf16 product with random operands (equal ones draw less power); integer_gigaops: the same
// of int8 with sums of 32 bits, 0 if the library has none.
// Best of several tries. Errors: there is no usable device, or this build has no CUDA.
absl::StatusOr<MachinePeaks> MeasureCudaPeaks();

}  // namespace treadle
