// Defaults that several rooms share: each of them stands here and nowhere else.
#pragma once

#include <cstdint>

namespace treadle {

inline constexpr int64_t kDefaultBatchSize = 32;                      // sequences in one iteration
inline constexpr int64_t kDefaultBatchTokens = 512;                   // tokens in one iteration
inline constexpr int64_t kDefaultPageSize = 32;                       // tokens in a page of K/V
inline constexpr int64_t kDefaultReplayLogMemory = int64_t{1} << 30;  // bytes

}  // namespace treadle
