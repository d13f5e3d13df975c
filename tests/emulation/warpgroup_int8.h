// The host's twin of kernels/cuda/row_int8/warpgroup_int8.h.
#pragma once

#include "tests/emulation/warpgroup.h"

namespace treadle::simt {

inline SharedMatrix ByteMatrixAt(
    const void* start, int next_terms, int next_columns,
    const std::source_location& where = std::source_location::current()) {
  return ByteMatrixBits(SharedOffset(start, where), static_cast<uint32_t>(next_terms),
                        static_cast<uint32_t>(next_columns));
}

inline void Pin(uint32_t (&)[4]) {}
inline void Pin(int&) {}
inline void WarpgroupMmaS8(int32_t (&d)[32][4], const uint32_t (&a)[4], SharedMatrix b,
                           const std::source_location& where = std::source_location::current()) {
  WarpgroupOperands operands{
      .d = &d[0][0], .a = a, .b = b.bits, .columns = 256, .type = DType::kI8, .add = true};
  Meet(Meeting::kWarpgroupMma, &operands, where);
}

}  // namespace treadle::simt
