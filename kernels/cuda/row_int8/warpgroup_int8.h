// Products of int8 on warpgroups: warpgroup.h, whose rules hold here as well. Sums are integers.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/warpgroup.h"

namespace treadle::simt {

// A matrix B of int8 in shared memory, in pieces of 8 columns x 16 terms: 128 bytes, 16 of each
// column (PTX: a core matrix; no swizzle). A SharedMatrix of this kind is for WarpgroupMmaS8 only.
inline constexpr int kBytePiece = 128;

// start: a shared memory address, a multiple of 16. next_terms, next_columns: bytes from a piece to
// the one of the next 16 terms, and of the next 8 columns.
TREADLE_HOST_DEVICE SharedMatrix ByteMatrixBits(uint32_t start, uint32_t next_terms,
                                                uint32_t next_columns) {
  return {uint64_t{(start & 0x3ffffu) >> 4} | (uint64_t{next_terms >> 4} << 16) |
          (uint64_t{next_columns >> 4} << 32)};
}

}  // namespace treadle::simt

#if !defined(__CUDACC__)
#include "emulation/warpgroup_int8.h"
#else

namespace treadle::simt {

TREADLE_DEVICE SharedMatrix ByteMatrixAt(const void* start, int next_terms, int next_columns) {
  return ByteMatrixBits(static_cast<uint32_t>(__cvta_generic_to_shared(start)),
                        static_cast<uint32_t>(next_terms), static_cast<uint32_t>(next_columns));
}

template <int kN>
TREADLE_DEVICE void Pin(int32_t (&d)[kN][4]) {
  TREADLE_UNROLL
  for (int i = 0; i < 4 * kN; ++i) asm volatile("" : "+r"(d[i / 4][i % 4])::"memory");
}
TREADLE_DEVICE void Pin(uint32_t (&a)[4]) {
  TREADLE_UNROLL
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Keeps the compiler from using, after this, what it computed from `value` before.
TREADLE_DEVICE void Pin(int& value) { asm volatile("" : "+r"(value)::"memory"); }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// D[64, 256] += A[64, 32] B[32, 256]. Warp w of the group has rows 16 w .. 16 w + 15 of A and D:
// fragments A and D[16, 8] (d[n]: columns 8 n ..) as simt.h's MmaS8.
TREADLE_DEVICE void WarpgroupMmaS8(int32_t (&d)[32][4], const uint32_t (&a)[4], SharedMatrix b) {
  asm volatile(
      "{ .reg .pred add; setp.eq.b32 add, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8"
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"
      "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,"
      "%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,"
      "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,"
      "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127},"
      " {%128,%129,%130,%131}, %132, add; }"
      : TREADLE_SUMS4("r", 0), TREADLE_SUMS4("r", 4), TREADLE_SUMS4("r", 8), TREADLE_SUMS4("r", 12),
        TREADLE_SUMS4("r", 16), TREADLE_SUMS4("r", 20), TREADLE_SUMS4("r", 24),
        TREADLE_SUMS4("r", 28)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits));
}

#else  // nobody launches it

TREADLE_DEVICE void WarpgroupMmaS8(int32_t (&)[32][4], const uint32_t (&)[4], SharedMatrix) {
  __trap();
}

#endif

}  // namespace treadle::simt

#endif  // __CUDACC__
