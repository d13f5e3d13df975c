// Q8_0: f16 d, 32 signed bytes; q * d.
#pragma once

#include "kernels/formats/families.h"

namespace treadle::formats {

inline void CodesQ8_0(const std::byte* data, int64_t group, CodeGroup& out) {
  const std::byte* block = data + group * 34;
  out.scale = LoadHalf(block);
  out.offset = 0;
  std::memcpy(out.codes, block + 2, 32);
}

}  // namespace treadle::formats
