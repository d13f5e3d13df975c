// How a vector source offers a function to the rest, which calls the one of the instruction set
// that was chosen.
//
//   TREADLE_ISA_KERNEL(SumRows, void(const float* x, int64_t n));
//
// declares SumRows in the namespace of the instruction set, where such a source defines it, and for
// everybody else kSumRows[isa], a pointer to it. Only plain pointers and numbers cross this line,
// because the two sides are compiled with different instruction sets (see simd.h on linkage). A
// source may be on both sides: the part within #ifdef TREADLE_ISA is compiled once per instruction
// set, the other part once.
//
// Kernels are stateless and do one thread's share: distinct shares may run at the same time.
#pragma once

#include <cstdint>

namespace treadle {

template <typename Function>
using IsaFunction = Function;

}  // namespace treadle

#ifdef TREADLE_ISA

#define TREADLE_ISA_KERNEL(name, ...) \
  namespace TREADLE_ISA {             \
  IsaFunction<__VA_ARGS__> name;      \
  }                                   \
  static_assert(true)

#else

#include "kernels/cpu/isa.h"

namespace treadle {

template <typename Function>
struct IsaKernel {
  Function* avx2;
  Function* avxvnni;
  Function* avx512;
  constexpr Function* operator[](CpuIsa isa) const {
    return isa == CpuIsa::kAvx2 ? avx2 : isa == CpuIsa::kAvxVnni ? avxvnni : avx512;
  }
};

}  // namespace treadle

#define TREADLE_ISA_KERNEL(name, ...) \
  namespace avx2 {                    \
  IsaFunction<__VA_ARGS__> name;      \
  }                                   \
  namespace avxvnni {                 \
  IsaFunction<__VA_ARGS__> name;      \
  }                                   \
  namespace avx512 {                  \
  IsaFunction<__VA_ARGS__> name;      \
  }                                   \
  inline constexpr IsaKernel<__VA_ARGS__> k##name = {avx2::name, avxvnni::name, avx512::name}

#endif
