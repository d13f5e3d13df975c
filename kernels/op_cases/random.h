// Seeded random numbers for tests and benchmarks, equal on every platform.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/sampling.h"

namespace treadle {

// A stream of the project's own counter-based generator. Confined to one thread.
class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}

  double Uniform() { return CounterUniform(seed_, 0, next_++); }  // [0, 1)
  double Uniform(double low, double high) { return low + (high - low) * Uniform(); }
  int64_t Below(int64_t bound) {
    return static_cast<int64_t>(Uniform() * static_cast<double>(bound));
  }
  // Nearly normal (the sum of four uniform numbers), of variance 1.
  float Normal() {
    double sum = 0;
    const auto at = static_cast<uint64_t>(next_++);
    for (uint32_t word :
         Philox4x32({static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32), 1},
                    {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)})) {
      sum += word * 0x1p-32;
    }
    return static_cast<float>((sum - 2) * 1.7320508);
  }

 private:
  const uint64_t seed_;
  int64_t next_ = 0;
};

// FNV-1a: gives every named case a seed of its own.
inline uint64_t SeedOf(std::string_view name, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325 ^ seed;
  for (char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return hash;
}

}  // namespace treadle
