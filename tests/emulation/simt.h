// The host's twin of kernels/cuda/runtime/simt.h, which includes it and whose contract it follows;
// what the functions do there, machine.h and warp_ops.cc do here. More is checked than a GPU would:
// alignment of 16-byte accesses, that addresses lie in shared memory, and that all lanes of a warp
// meet at the same operation.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <source_location>

#include "kernels/dtype.h"
#include "tests/emulation/machine.h"

namespace treadle::simt {

// -- indices --------------------------------------------------------------------------------------
inline int Thread() { return t_here.thread; }
inline int Threads() { return t_here.threads; }
inline int Lane() { return t_here.thread & 31; }
inline int Warp() { return t_here.thread >> 5; }
inline int BlockX() { return t_here.block[0]; }
inline int BlockY() { return t_here.block[1]; }
inline int BlockZ() { return t_here.block[2]; }
inline int GridX() { return t_here.grid[0]; }
inline int GridY() { return t_here.grid[1]; }

template <typename T>
inline T* DynamicShared() {
  return reinterpret_cast<T*>(t_here.shared);
}

// -- the launches before --------------------------------------------------------------------------
inline void AwaitEarlierLaunches(
    const std::source_location& where = std::source_location::current()) {
  AwaitEarlierGrids(where);
}

// -- barriers -------------------------------------------------------------------------------------
inline void SyncThreads(const std::source_location& where = std::source_location::current()) {
  Meet(Meeting::kSyncThreads, nullptr, where);
}
inline void SyncWarpgroup(const std::source_location& where = std::source_location::current()) {
  Meet(Meeting::kSyncWarpgroup, nullptr, where);
}
inline void SyncWarp(const std::source_location& where = std::source_location::current()) {
  Meet(Meeting::kSyncWarp, nullptr, where);
}

// -- warp exchanges -------------------------------------------------------------------------------
template <typename T>
inline T ExchangeLanes(Meeting meeting, T value, int from, const std::source_location& where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  Exchange exchange{.value = 0, .from = from};
  std::memcpy(&exchange.value, &value, sizeof(T));
  Meet(meeting, &exchange, where);
  std::memcpy(&value, &exchange.value, sizeof(T));
  return value;
}
template <typename T>
inline T Shuffle(T value, int lane,
                 const std::source_location& where = std::source_location::current()) {
  return ExchangeLanes(Meeting::kShuffle, value, lane & 31, where);
}
template <typename T>
inline T ShuffleXor(T value, int mask,
                    const std::source_location& where = std::source_location::current()) {
  const int from = Lane() ^ mask;
  return ExchangeLanes(Meeting::kShuffleXor, value, from < 32 ? from : Lane(), where);
}
template <typename T>
inline T ShuffleUp(T value, int delta,
                   const std::source_location& where = std::source_location::current()) {
  const int from = Lane() - delta;
  return ExchangeLanes(Meeting::kShuffleUp, value, from >= 0 ? from : Lane(), where);
}
inline uint32_t Ballot(bool predicate,
                       const std::source_location& where = std::source_location::current()) {
  Exchange exchange{.value = predicate, .from = 0};
  Meet(Meeting::kBallot, &exchange, where);
  return static_cast<uint32_t>(exchange.value);
}

// -- atomics --------------------------------------------------------------------------------------
inline uint32_t AtomicAdd(uint32_t* address, uint32_t value) {
  return std::atomic_ref<uint32_t>(*address).fetch_add(value, std::memory_order_relaxed);
}
inline uint32_t AtomicOr(uint32_t* address, uint32_t value) {
  return std::atomic_ref<uint32_t>(*address).fetch_or(value, std::memory_order_relaxed);
}
inline uint32_t AtomicMax(uint32_t* address, uint32_t value) {
  std::atomic_ref<uint32_t> word(*address);
  uint32_t old = word.load(std::memory_order_relaxed);
  while (old < value && !word.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
  }
  return old;
}

// -- matrix instructions --------------------------------------------------------------------------
inline void MmaBf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                    const std::source_location& where = std::source_location::current()) {
  MmaOperands operands{d, a, b};
  Meet(Meeting::kMmaBf16, &operands, where);
}
inline void MmaF16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                   const std::source_location& where = std::source_location::current()) {
  MmaOperands operands{d, a, b};
  Meet(Meeting::kMmaF16, &operands, where);
}
inline void MmaS8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  const std::source_location& where = std::source_location::current()) {
  MmaOperands operands{d, a, b};
  Meet(Meeting::kMmaS8, &operands, where);
}

inline bool IsAligned16(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}
// All 16 bytes.
inline bool IsShared16(const void* address) {
  const auto offset =
      reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(t_here.shared);
  return offset < t_here.shared_bytes && t_here.shared_bytes - offset >= 16;
}
inline void LoadMatrix(Meeting meeting, uint32_t (&r)[4], const void* row,
                       const std::source_location& where) {
  if (!IsAligned16(row)) KernelFailed(where, "ldmatrix: a row that is not 16-byte aligned");
  if (!IsShared16(row)) KernelFailed(where, "ldmatrix: a row that is not in shared memory");
  LoadMatrixOperands operands{r, row};
  Meet(meeting, &operands, where);
}
inline void LoadMatrix4(uint32_t (&r)[4], const void* row,
                        const std::source_location& where = std::source_location::current()) {
  LoadMatrix(Meeting::kLoadMatrix4, r, row, where);
}
inline void LoadMatrix4Transposed(
    uint32_t (&r)[4], const void* row,
    const std::source_location& where = std::source_location::current()) {
  LoadMatrix(Meeting::kLoadMatrix4Transposed, r, row, where);
}

// -- asynchronous copies --------------------------------------------------------------------------
inline void CopyAsync16(void* shared, const void* global, bool valid = true,
                        const std::source_location& where = std::source_location::current()) {
  IssueCopy(shared, global, valid, where);
}
inline void CopyAsyncCommit() { CommitCopies(); }
template <int kPending>
inline void CopyAsyncWait() {
  static_assert(kPending >= 0);
  WaitForCopies(kPending);
}

// -- loads of what is read once -------------------------------------------------------------------
inline Words4 LoadOnce16(const void* global,
                         const std::source_location& where = std::source_location::current()) {
  if (!IsAligned16(global)) KernelFailed(where, "LoadOnce16: an address that is not aligned");
  Words4 words;
  std::memcpy(&words, global, sizeof(words));
  return words;
}
inline void LoadOnce16If(bool valid, const void* global, uint32_t (&r)[4],
                         const std::source_location& where = std::source_location::current()) {
  if (!valid) return;
  const Words4 words = LoadOnce16(global, where);
  std::memcpy(r, &words, sizeof(words));
}

// -- a thread's own memory ------------------------------------------------------------------------
template <typename T>
inline T* InMemory(T* own) {
  return own;
}

// -- numbers --------------------------------------------------------------------------------------
inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float Exp(float x) { return std::exp(x); }
inline float Erfc(float x) { return std::erfc(x); }
inline float Expm1(float x) { return std::expm1(x); }
inline float Tanh(float x) { return std::tanh(x); }
inline float Exp2(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
inline float Sqrt(float x) { return std::sqrt(x); }
inline float Divide(float a, float b) { return a / b; }
// Saturates; NaN gives 0.
inline int RoundHalfEven(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.0f) return std::numeric_limits<int>::max();
  if (x < -2147483648.0f) return std::numeric_limits<int>::min();
  return static_cast<int>(std::nearbyint(x));
}
inline float AsFloat(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t AsBits(float x) { return std::bit_cast<uint32_t>(x); }
inline float Infinity() { return std::numeric_limits<float>::infinity(); }
inline float Max(float a, float b) { return std::fmax(a, b); }

inline uint32_t PickBytes(uint32_t low, uint32_t high, uint32_t selector,
                          const std::source_location& where = std::source_location::current()) {
  if ((selector & 0x8888u) != 0) {
    KernelFailed(where, "PickBytes: a selector above 7 (a GPU would repeat the byte's sign)");
  }
  const uint64_t bytes = (uint64_t{high} << 32) | low;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = (selector >> (4 * i)) & 7u;
    picked |= static_cast<uint32_t>((bytes >> (8 * byte)) & 0xffu) << (8 * i);
  }
  return picked;
}

inline float FromBf16(uint16_t bits) { return ToFloat(BFloat16{bits}); }
inline uint16_t ToBf16(float x) { return ToBFloat16(x).bits; }
inline float FromF16(uint16_t bits) { return ToFloat(Half{bits}); }
inline uint16_t ToF16(float x) { return ToHalf(x).bits; }
inline uint32_t PackBf16(float low, float high) {
  return uint32_t{ToBf16(low)} | (uint32_t{ToBf16(high)} << 16);
}
inline uint32_t PackF16(float low, float high) {
  return uint32_t{ToF16(low)} | (uint32_t{ToF16(high)} << 16);
}
// Finite numbers beyond f16's range, which should not be there, become infinite.
inline uint32_t PackSmallF16(float low, float high) {
  const auto grown = [](float x) {
    return x >= 65520 ? Infinity() : x <= -65520 ? -Infinity() : x;
  };
  return PackF16(grown(low), grown(high));
}

}  // namespace treadle::simt
