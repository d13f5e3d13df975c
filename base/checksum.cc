#include "base/checksum.h"

#include <array>
#include <bit>
#include <cstring>

namespace treadle {
namespace {

static_assert(std::endian::native == std::endian::little);

uint64_t Word(const std::byte* data) {
  uint64_t word = 0;
  std::memcpy(&word, data, 8);
  return word;
}

// One to one in each argument, so that no change of a word is lost on the way.
uint64_t Mix(uint64_t state, uint64_t word) {
  return std::rotl((state ^ word) * 0x9e3779b97f4a7c15, 29);
}

}  // namespace

uint64_t Checksum(uint64_t seed, const std::byte* data, size_t bytes) {
  // Eight chains at once, since each waits for its own multiplication.
  constexpr size_t kLanes = 8;
  std::array<uint64_t, kLanes> lanes;
  for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = Mix(seed, lane);
  size_t at = 0;
  for (; at + 8 * kLanes <= bytes; at += 8 * kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = Mix(lanes[lane], Word(data + at + 8 * lane));
    }
  }
  uint64_t hash = Mix(seed, bytes);
  for (; at + 8 <= bytes; at += 8) hash = Mix(hash, Word(data + at));
  if (at < bytes) {
    uint64_t last = 0;
    std::memcpy(&last, data + at, bytes - at);
    hash = Mix(hash, last);
  }
  for (const uint64_t lane : lanes) hash = Mix(hash, lane);
  // The last bits in must reach the low ones too.
  return Mix(hash, hash >> 32);
}

}  // namespace treadle
