// The ceilings of this machine that a kernel's speed is read against, measured: with the same
// threads and the same instruction set as the kernels.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/thread_pool.h"

namespace treadle {

struct MachinePeaks {
  double read_gigabytes = 0;   // GB/s, from a buffer far larger than any cache
  double float_gigaops = 0;    // GFLOP/s of fused multiply-adds (two operations each)
  double integer_gigaops = 0;  // GOP/s of 8-bit products summed to 32 bits (16 in pairs on AVX2)
  bool tiles = false;          // these are AMX's, whose products of bf16 take twice as long
};

// Takes about a second. Best of several tries.
MachinePeaks MeasurePeaks(ThreadPool& pool, CpuIsa isa);

// The ceilings of a GPU: what its copies and the vendor's library reach. read_gigabytes: bytes read
// and written by large copies on the device; float_gigaops: cuBLASLt on a large bf16 product with
// random operands (equal ones draw less power); integer_gigaops: the same of int8 with sums of 32
// bits, 0 if the library has none. Best of several tries. Call from one thread. Errors: there is no
// usable device, or this build has no CUDA.
absl::StatusOr<MachinePeaks> MeasureCudaPeaks();

// The loops themselves. Their result keeps the compiler from dropping them.
struct PeakLoops {
  float (*fma)(int64_t rounds);
  int32_t (*integer)(int64_t rounds);
  int64_t (*read)(const uint8_t* data, int64_t bytes);
  double fma_ops;  // operations a round
  double integer_ops;
  int32_t (*tile)(int64_t rounds);  // AMX's; null but in avx512
  double tile_ops;
};
namespace avx2 {
extern const PeakLoops kPeakLoops;
}
namespace avxvnni {
extern const PeakLoops kPeakLoops;
}
namespace avx512 {
extern const PeakLoops kPeakLoops;
}

}  // namespace treadle
