#include "kernels/sampling.h"

namespace treadle {

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9;  // the golden ratio
    key[1] += 0xBB67AE85;  // sqrt(3) - 1
  }
  return counter;
}

double CounterUniform(uint64_t seed, uint32_t candidate, int64_t position) {
  const uint64_t at = static_cast<uint64_t>(position);
  const auto out =
      Philox4x32({static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32), candidate, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = (uint64_t{out[1]} << 32) | out[0];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace treadle
