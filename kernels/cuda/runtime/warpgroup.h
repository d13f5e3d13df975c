// Matrix instructions of warpgroups (PTX: wgmma, sm_90a only), for kernels as simt.h says.
//
// A warpgroup is four warps in a row, the first a multiple of four. All its threads call each of
// these functions. A product reads A from registers and B from shared memory, and is on its way
// until it is waited for: till then neither d, nor B, may be touched, nor a be changed. The order:
//   Pin(d), Pin(a)    keeps the compiler from computing them later than this
//   WarpgroupFence    what was written to registers of d and a is seen by the products after it
//   WarpgroupMma ...  products onto the same d follow one another
//   WarpgroupCommit   what was issued becomes a group
//   WarpgroupWait<n>  until at most n groups are on their way
//   Pin(d)            keeps the compiler from reading them earlier than this
// B must have been written (copies: waited for) before an AsyncFence of the writing thread and a
// barrier after that.
//
// In builds or on devices without these instructions a kernel that uses them must not be launched:
// DeviceProperties::warpgroup_matrices.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/simt.h"
#include "kernels/dtype.h"

namespace treadle::simt {

inline constexpr int kWarpgroup = 128;  // threads

// A matrix of 16-bit elements in shared memory, in rows of 64 elements (128 bytes) whose 16-byte
// pieces change places: piece c of row r lies at c ^ (r % 8). Eight rows begin at a multiple of
// 1024 bytes. A row holds 64 terms (k) of one column (kColumns), or 64 columns of one term
// (kTerms).
//   bits  PTX, "matrix descriptor": start, leading and stride offset in units of 16 bytes, 128-byte
//         swizzle
struct SharedMatrix {
  uint64_t bits = 0;
};
enum class RowsOf { kColumns, kTerms };

inline constexpr int kMatrixRowBytes = 128;

// Where piece `piece` of row `row` lies from the matrix's start on.
TREADLE_HOST_DEVICE int MatrixPiece(int row, int piece) {
  return row * kMatrixRowBytes + ((piece ^ (row & 7)) << 4);
}

// start: a shared memory address. next_rows: bytes from eight rows to the next eight.
// next_columns: RowsOf::kTerms: bytes from 64 columns to the next 64.
TREADLE_HOST_DEVICE SharedMatrix MatrixBits(uint32_t start, uint32_t next_rows,
                                            uint32_t next_columns) {
  return {uint64_t{(start & 0x3ffffu) >> 4} | (uint64_t{next_columns >> 4} << 16) |
          (uint64_t{next_rows >> 4} << 32) | (uint64_t{1} << 62)};
}
// The matrix that begins so many bytes (a multiple of 16) further on.
TREADLE_HOST_DEVICE SharedMatrix Advance(SharedMatrix matrix, int bytes) {
  return {matrix.bits + static_cast<uint64_t>(bytes >> 4)};
}

}  // namespace treadle::simt

#if !defined(__CUDACC__)
#include "emulation/warpgroup.h"
#else

namespace treadle::simt {

TREADLE_DEVICE SharedMatrix MatrixAt(const void* start, int next_rows, int next_columns) {
  return MatrixBits(static_cast<uint32_t>(__cvta_generic_to_shared(start)),
                    static_cast<uint32_t>(next_rows), static_cast<uint32_t>(next_columns));
}

template <int kN>
TREADLE_DEVICE void Pin(float (&d)[kN][4]) {
  TREADLE_UNROLL
  for (int i = 0; i < 4 * kN; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}
template <int kN>
TREADLE_DEVICE void Pin(uint32_t (&a)[kN][4]) {
  TREADLE_UNROLL
  for (int i = 0; i < 4 * kN; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// Sums as operands of an instruction: those of d[n], and of four from there on. kind: "f" or "r".
#define TREADLE_SUMS(kind, n) \
  "+" kind(d[n][0]), "+" kind(d[n][1]), "+" kind(d[n][2]), "+" kind(d[n][3])
#define TREADLE_SUMS4(kind, n)                                                 \
  TREADLE_SUMS(kind, n), TREADLE_SUMS(kind, n + 1), TREADLE_SUMS(kind, n + 2), \
      TREADLE_SUMS(kind, n + 3)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

TREADLE_DEVICE void AsyncFence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
TREADLE_DEVICE void WarpgroupFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TREADLE_DEVICE void WarpgroupCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
TREADLE_DEVICE void WarpgroupWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define TREADLE_MMA_64(type)                                                                     \
  asm volatile(                                                                                  \
      "{ .reg .pred add; setp.ne.b32 add, %37, 0;\n"                                             \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
      "%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1, %38; }"              \
      : TREADLE_SUMS4("f", 0), TREADLE_SUMS4("f", 4)                                             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(static_cast<int>(add)),     \
        "n"(kTransposed))
#define TREADLE_MMA_128(type)                                                                    \
  asm volatile(                                                                                  \
      "{ .reg .pred add; setp.ne.b32 add, %69, 0;\n"                                             \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                               \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45," \
      "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "               \
      "{%64,%65,%66,%67}, %68, add, 1, 1, %70; }"                                                \
      : TREADLE_SUMS4("f", 0), TREADLE_SUMS4("f", 4), TREADLE_SUMS4("f", 8),                     \
        TREADLE_SUMS4("f", 12)                                                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(static_cast<int>(add)),     \
        "n"(kTransposed))

// D[64, 8 kN] = A[64, 16] B[16, 8 kN] (+ D, if `add`), sums of float. Warp w of the group has rows
// 16 w .. 16 w + 15 of A and D: fragments A and D[16, 8] (d[n]: columns 8 n ..) as simt.h's mma.
template <DType kType, RowsOf kRows, int kN>
TREADLE_DEVICE void WarpgroupMma(float (&d)[kN][4], const uint32_t (&a)[4], SharedMatrix b,
                                 bool add) {
  static_assert(kType == DType::kF16 || kType == DType::kBF16);
  static_assert(kN == 8 || kN == 16);
  constexpr int kTransposed = kRows == RowsOf::kTerms ? 1 : 0;
  if constexpr (kN == 8 && kType == DType::kF16) {
    TREADLE_MMA_64("f16");
  } else if constexpr (kN == 8) {
    TREADLE_MMA_64("bf16");
  } else if constexpr (kType == DType::kF16) {
    TREADLE_MMA_128("f16");
  } else {
    TREADLE_MMA_128("bf16");
  }
}
#undef TREADLE_MMA_64
#undef TREADLE_MMA_128

#else  // nobody launches it

TREADLE_DEVICE void AsyncFence() { __trap(); }
TREADLE_DEVICE void WarpgroupFence() { __trap(); }
TREADLE_DEVICE void WarpgroupCommit() { __trap(); }
template <int kPending>
TREADLE_DEVICE void WarpgroupWait() {
  __trap();
}
template <DType kType, RowsOf kRows, int kN>
TREADLE_DEVICE void WarpgroupMma(float (&)[kN][4], const uint32_t (&)[4], SharedMatrix, bool) {
  __trap();
}

#endif

}  // namespace treadle::simt

#endif  // __CUDACC__
