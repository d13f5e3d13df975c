// The machine as kernels of this folder need it, and nothing else: built-in indices, barriers,
// warp exchanges, matrix instructions, asynchronous copies, conversions.
//
// Kernels are written once, in .cu files, and compiled twice: by nvcc for a GPU (this header), and
// as plain C++ for the emulation (tests/emulation/simt.h), in which every thread is a fiber,
// every barrier and warp exchange really waits, and asynchronous copies land only when they are
// waited for. So the op-case list checks the very kernels on machines without a GPU; what it cannot
// check is what an instruction does on real hardware, and speed.
//
// Rules that keep a kernel in both worlds:
//   * a kernel takes one parameter struct by value, trivially copyable, at most 4 KB:
//       TREADLE_KERNEL(256) void AddKernel(AddParams p) { ... }
//     256: the most threads per block that it is launched with; always a multiple of 32, in x only;
//     TREADLE_KERNEL(256, 2): and so many blocks shall fit a multiprocessor;
//   * shared memory is dynamic only: auto* tile = simt::DynamicShared<float>(); 1024-byte aligned,
//     its size is given at the launch, its contents are undefined at first;
//   * every thread of every kernel calls AwaitEarlierLaunches exactly once, before any return, the
//     lanes of a warp together; what may be touched before it, it says itself;
//   * warp functions and mma are called by all 32 lanes of a warp; SyncThreads by all threads;
//     SyncWarpgroup by all of four warps in a row, the first the block's first or fifth;
//   * no vendor types; 16-byte accesses go through Words4;
//   * arithmetic is compiled without contraction: where a fused multiply-add is meant, say Fma.
// Functions are TREADLE_DEVICE; those that host code uses as well (index maps, plans) are
// TREADLE_HOST_DEVICE, and what it includes takes both words from host_device.h, not from here.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/host_device.h"

#if !defined(__CUDACC__)
#include "emulation/simt.h"
#else

namespace treadle::simt {

// -- indices --------------------------------------------------------------------------------------
TREADLE_DEVICE int Thread() { return static_cast<int>(threadIdx.x); }
TREADLE_DEVICE int Threads() { return static_cast<int>(blockDim.x); }
TREADLE_DEVICE int Lane() { return static_cast<int>(threadIdx.x & 31); }
TREADLE_DEVICE int Warp() { return static_cast<int>(threadIdx.x >> 5); }
TREADLE_DEVICE int BlockX() { return static_cast<int>(blockIdx.x); }
TREADLE_DEVICE int BlockY() { return static_cast<int>(blockIdx.y); }
TREADLE_DEVICE int BlockZ() { return static_cast<int>(blockIdx.z); }
TREADLE_DEVICE int GridX() { return static_cast<int>(gridDim.x); }
TREADLE_DEVICE int GridY() { return static_cast<int>(gridDim.y); }

template <typename T>
TREADLE_DEVICE T* DynamicShared() {
  extern __shared__ __align__(1024) unsigned char treadle_shared[];
  return reinterpret_cast<T*>(treadle_shared);
}

// -- the launches before --------------------------------------------------------------------------
// Blocks of a launch may become resident while launches before it still run, and work on what they
// need not wait for. Before this returns, a kernel may read its parameters and constants (weights
// and tables: the host copied them and waited for that, and no kernel writes them) and write shared
// memory. It may not read what an earlier launch or copy writes, nor write global memory at all.
// When it returns, everything earlier in the stream is done and seen: the launch before has itself
// waited, in all its threads, for those before it. So no thread may end without it.
//
// It also lets the next launch become resident, once all blocks of this one have come here or
// ended. None of them needs a place by then, so the next launch takes nobody's, and whatever waits
// is behind something that can end. Several launches may be waiting at once; each waits for the one
// before it.
//
// PTX ISA, griddepcontrol, from sm_90 on: the wait is until the launch before has completed and its
// stores are visible, however early that has let this one begin. Code for less than sm_90 does
// nothing here, and is launched without the attribute that allows all this (cuda_device.cc).
TREADLE_DEVICE void AwaitEarlierLaunches() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// -- barriers -------------------------------------------------------------------------------------
TREADLE_DEVICE void SyncThreads() { __syncthreads(); }
TREADLE_DEVICE void SyncWarp() { __syncwarp(); }
// Barrier 0 is SyncThreads'. The numbers are immediate, or ptxas would reserve all 16 of a block,
// of which a multiprocessor has 64 or less.
TREADLE_DEVICE void SyncWarpgroup() {
  if (threadIdx.x < 128) {
    asm volatile("bar.sync 1, 128;" : : : "memory");
  } else {
    asm volatile("bar.sync 2, 128;" : : : "memory");
  }
}

// -- warp exchanges: T of 4 or 8 bytes, all lanes -------------------------------------------------
template <typename T>
TREADLE_DEVICE T Shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <typename T>
TREADLE_DEVICE T ShuffleXor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
// The value of lane - delta; the own value where that lane does not exist.
template <typename T>
TREADLE_DEVICE T ShuffleUp(T value, int delta) {
  return __shfl_up_sync(0xffffffffu, value, delta);
}
// Bit i: lane i's predicate.
TREADLE_DEVICE uint32_t Ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

// -- atomics, on global or shared memory; they return the old value -------------------------------
TREADLE_DEVICE uint32_t AtomicAdd(uint32_t* address, uint32_t value) {
  return atomicAdd(address, value);
}
TREADLE_DEVICE uint32_t AtomicOr(uint32_t* address, uint32_t value) {
  return atomicOr(address, value);
}
TREADLE_DEVICE uint32_t AtomicMax(uint32_t* address, uint32_t value) {
  return atomicMax(address, value);
}

// -- matrix instructions --------------------------------------------------------------------------
// D[16, 8] += A[16, k] B[k, 8], one warp; k = 16 for 16-bit types, 32 for int8. Fragments of lane
// l, with g = l / 4 and t = l % 4, as PTX (mma.m16n8k16, mma.m16n8k32) defines them:
//   16-bit: a[0] = A[g][2t, 2t+1]   a[1] = A[g+8][2t, 2t+1]   a[2] = A[g][2t+8, +9]
//           a[3] = A[g+8][2t+8, +9] b[0] = B[2t, 2t+1][g]     b[1] = B[2t+8, 2t+9][g]
//   int8:   a[0] = A[g][4t..4t+3]   a[1] = A[g+8][4t..]       a[2] = A[g][4t+16..]
//           a[3] = A[g+8][4t+16..]  b[0] = B[4t..4t+3][g]     b[1] = B[4t+16..][g]
//   D:      d[0] = D[g][2t]  d[1] = D[g][2t+1]  d[2] = D[g+8][2t]  d[3] = D[g+8][2t+1]
// The element of the lower index lies in the lower bits. Sums are of float (exact for int8).
TREADLE_DEVICE void MmaBf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
TREADLE_DEVICE void MmaF16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
TREADLE_DEVICE void MmaS8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of 16-bit elements from shared memory: lane 8 j + i gives the address of row i
// of matrix j (16 bytes, aligned); r[j] of lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of
// row l / 4 of matrix j. Transposed: of column l / 4 instead.
TREADLE_DEVICE void LoadMatrix4(uint32_t (&r)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
TREADLE_DEVICE void LoadMatrix4Transposed(uint32_t (&r)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// -- asynchronous copies --------------------------------------------------------------------------
// 16 bytes, aligned, from global to shared memory; zeros if not `valid` (then `global` is not read,
// but must be a valid address). The thread that issued them sees them after
// Commit and Wait; others after a SyncThreads that follows that Wait.
TREADLE_DEVICE void CopyAsync16(void* shared, const void* global, bool valid = true) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(address), "l"(global), "r"(bytes)
               : "memory");
}
TREADLE_DEVICE void CopyAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kPending of the committed groups are on their way.
template <int kPending>
TREADLE_DEVICE void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// -- loads of what is read once -------------------------------------------------------------------
// Loads a constant (AwaitEarlierLaunches): L1 could hold what a launch writes as it was before.
// Does not stay in L1.
TREADLE_DEVICE Words4 LoadOnce16(const void* global) {
  Words4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(global));
  return r;
}
// The same to r, if `valid`; otherwise r stays and nothing is read.
TREADLE_DEVICE void LoadOnce16If(bool valid, const void* global, uint32_t (&r)[4]) {
  asm volatile(
      "{ .reg .pred valid; setp.ne.b32 valid, %5, 0;\n"
      "@valid ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4]; }"
      : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
      : "l"(global), "r"(static_cast<int>(valid)));
}

// -- a thread's own memory ------------------------------------------------------------------------
// The same address, but the compiler cannot keep in registers what lies there.
template <typename T>
TREADLE_DEVICE T* InMemory(T* own) {
  asm volatile("" : "+l"(own) : : "memory");
  return own;
}

// -- numbers --------------------------------------------------------------------------------------
TREADLE_DEVICE float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TREADLE_DEVICE float Exp(float x) { return expf(x); }
TREADLE_DEVICE float Erfc(float x) { return erfcf(x); }
TREADLE_DEVICE float Expm1(float x) { return expm1f(x); }
TREADLE_DEVICE float Tanh(float x) { return tanhf(x); }
// 2^x within 2^-22 of it; one instruction. Exact at 0, 0 at -infinity; results below 2^-126 are 0.
TREADLE_DEVICE float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TREADLE_DEVICE float Sqrt(float x) { return __fsqrt_rn(x); }
TREADLE_DEVICE float Divide(float a, float b) { return __fdiv_rn(a, b); }
TREADLE_DEVICE int RoundHalfEven(float x) { return __float2int_rn(x); }
TREADLE_DEVICE float AsFloat(uint32_t bits) { return __uint_as_float(bits); }
TREADLE_DEVICE uint32_t AsBits(float x) { return __float_as_uint(x); }
TREADLE_DEVICE float Infinity() { return __int_as_float(0x7f800000); }
// The larger; of a NaN and a number, the number. Of zeros, either.
TREADLE_DEVICE float Max(float a, float b) { return fmaxf(a, b); }

// Bytes of (high: low) chosen by the four nibbles of `selector`.
TREADLE_DEVICE uint32_t PickBytes(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

TREADLE_DEVICE float FromBf16(uint16_t bits) { return AsFloat(uint32_t{bits} << 16); }
// Half to even.
TREADLE_DEVICE uint16_t ToBf16(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
TREADLE_DEVICE float FromF16(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
// Half to even; finite values saturate (docs/design.md, Numerics), infinities and NaN stay.
TREADLE_DEVICE uint16_t ToF16(float x) {
  const float magnitude = fabsf(x);
  const float finite = magnitude < Infinity() ? fminf(fmaxf(x, -65504.0f), 65504.0f) : x;
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(finite));
  return bits;
}
// Two numbers in a word, `low` in the lower half.
TREADLE_DEVICE uint32_t PackBf16(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
TREADLE_DEVICE uint32_t PackF16(float low, float high) {
  return uint32_t{ToF16(low)} | (uint32_t{ToF16(high)} << 16);
}
// The same of numbers that are at most 65504 in magnitude, or not finite: nothing to saturate.
TREADLE_DEVICE uint32_t PackSmallF16(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

}  // namespace treadle::simt

#endif  // __CUDACC__

namespace treadle::simt {

// Stores before it are seen by every block that sees a store or an atomic operation of this thread
// after it. In the emulation blocks run one after the other.
TREADLE_DEVICE void Fence() {
#if defined(__CUDACC__)
  __threadfence();
#endif
}

// -- the 16-bit type that a kernel is compiled for ------------------------------------------------
// MmaF16 or MmaBf16.
template <bool kBf16>
TREADLE_DEVICE void Mma16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kBf16) {
    MmaBf16(d, a, b);
  } else {
    MmaF16(d, a, b);
  }
}
// PackF16 or PackBf16.
TREADLE_DEVICE uint32_t Pack16(bool bf16, float low, float high) {
  return bf16 ? PackBf16(low, high) : PackF16(low, high);
}

// -- floats side by side, aligned as one ----------------------------------------------------------
TREADLE_DEVICE void LoadFloats(const void* from, float (&x)[4]) {
  const Words4 words = *static_cast<const Words4*>(from);
  x[0] = AsFloat(words.x);
  x[1] = AsFloat(words.y);
  x[2] = AsFloat(words.z);
  x[3] = AsFloat(words.w);
}
TREADLE_DEVICE void LoadFloats(const void* from, float (&x)[2]) {
  const Words2 words = *static_cast<const Words2*>(from);
  x[0] = AsFloat(words.x);
  x[1] = AsFloat(words.y);
}
TREADLE_DEVICE void StoreFloats(const float (&x)[4], void* to) {
  *static_cast<Words4*>(to) = {AsBits(x[0]), AsBits(x[1]), AsBits(x[2]), AsBits(x[3])};
}
TREADLE_DEVICE void StoreFloats(const float (&x)[2], void* to) {
  *static_cast<Words2*>(to) = {AsBits(x[0]), AsBits(x[1])};
}

// -- over a warp, every lane gets the result; one fixed order -------------------------------------
TREADLE_DEVICE float WarpSum(float x) {
  TREADLE_UNROLL
  for (int mask = 16; mask > 0; mask >>= 1) x += ShuffleXor(x, mask);
  return x;
}
template <typename T>
TREADLE_DEVICE T WarpMax(T x) {
  TREADLE_UNROLL
  for (int mask = 16; mask > 0; mask >>= 1) {
    const T other = ShuffleXor(x, mask);
    x = other > x ? other : x;
  }
  return x;
}

}  // namespace treadle::simt
