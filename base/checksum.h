// A checksum against damage, of messages and of files. Thread safety: a pure function.
#pragma once

#include <cstddef>
#include <cstdint>

namespace treadle {

// A 64-bit hash, begun with `seed`: any change within eight bytes changes it, others do but for one
// in 2^64. No defence against those who choose the bytes.
uint64_t Checksum(uint64_t seed, const std::byte* data, size_t bytes);

}  // namespace treadle
