// The host's twin of kernels/cuda/runtime/warpgroup.h. Products are carried out by
// warpgroup_unit.cc.
#pragma once

#include "tests/emulation/machine.h"
#include "tests/emulation/simt.h"
#include "tests/emulation/warpgroup_unit.h"

namespace treadle::simt {

// Where a matrix begins: addresses count from the block's shared memory on.
inline uint32_t SharedOffset(const void* start, const std::source_location& where) {
  if (!IsAligned16(start)) KernelFailed(where, "a matrix that is not 16-byte aligned");
  if (!IsShared16(start)) KernelFailed(where, "a matrix that is not in shared memory");
  return static_cast<uint32_t>(static_cast<const unsigned char*>(start) - t_here.shared);
}
inline SharedMatrix MatrixAt(const void* start, int next_rows, int next_columns,
                             const std::source_location& where = std::source_location::current()) {
  return MatrixBits(SharedOffset(start, where), static_cast<uint32_t>(next_rows),
                    static_cast<uint32_t>(next_columns));
}

template <typename T, int kN>
inline void Pin(T (&)[kN][4]) {}
inline void AsyncFence() { FenceCopies(); }
inline void WarpgroupFence(const std::source_location& where = std::source_location::current()) {
  Meet(Meeting::kWarpgroupFence, nullptr, where);
}
inline void WarpgroupCommit(const std::source_location& where = std::source_location::current()) {
  Meet(Meeting::kWarpgroupCommit, nullptr, where);
}
template <int kPending>
inline void WarpgroupWait(const std::source_location& where = std::source_location::current()) {
  WarpgroupOperands operands{.pending = kPending};
  Meet(Meeting::kWarpgroupWait, &operands, where);
}
template <DType kType, RowsOf kRows, int kN>
inline void WarpgroupMma(float (&d)[kN][4], const uint32_t (&a)[4], SharedMatrix b, bool add,
                         const std::source_location& where = std::source_location::current()) {
  static_assert(kType == DType::kF16 || kType == DType::kBF16);
  static_assert(kN == 8 || kN == 16);
  WarpgroupOperands operands{.d = &d[0][0],
                             .a = a,
                             .b = b.bits,
                             .columns = 8 * kN,
                             .type = kType,
                             .rows_are_terms = kRows == RowsOf::kTerms,
                             .add = add};
  Meet(Meeting::kWarpgroupMma, &operands, where);
}

}  // namespace treadle::simt
