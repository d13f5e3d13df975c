// Words for headers of kernels that host code includes as well: those for functions of a
// device, and the types of one access. nvcc gives them their meaning; for other compilers (host
// code, and the emulation, tests/emulation) such a function is one like others.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TREADLE_KERNEL(...) __global__ __launch_bounds__(__VA_ARGS__)
#define TREADLE_DEVICE __device__ __forceinline__
#define TREADLE_HOST_DEVICE __host__ __device__ __forceinline__
#define TREADLE_UNROLL _Pragma("unroll")
#else
#define TREADLE_KERNEL(...)
#define TREADLE_DEVICE inline
#define TREADLE_HOST_DEVICE inline
#define TREADLE_UNROLL
#endif

namespace treadle::simt {

// 16 bytes, loaded and stored at once.
struct alignas(16) Words4 {
  uint32_t x, y, z, w;
};
struct alignas(8) Words2 {
  uint32_t x, y;
};
inline constexpr int kWarp = 32;

}  // namespace treadle::simt
