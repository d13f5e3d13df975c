// Values that tests and the scripts that made their oracles compute alike.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>
#include <vector>

namespace treadle {

// `values` of tests/oracles/make_quantize_oracles.py.
inline std::vector<float> OracleValues(std::string_view kind, uint32_t seed, int64_t count) {
  std::vector<float> values;
  double largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B1u + seed * 0x85EBCA77u;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    if (kind == "between") {
      if (i % 128 == 0) largest = 1 + std::ldexp(x & 0x7fffff, -23);
      const double part = static_cast<double>(i % 128);
      values.push_back(static_cast<float>(i % 128 == 0 ? largest : (part - 0.5) * largest / 127));
    } else if (kind == "grid") {
      values.push_back((static_cast<float>(x % 255) - 127) / 2);
    } else {
      const int smooth = static_cast<int>(x & 0xffff) + static_cast<int>(x >> 16) - 65535;
      const double value = std::ldexp(smooth, kind == "tiny" ? -145 : -20);
      values.push_back(i % 97 == 5 ? -0.0f : i / 128 % 9 == 4 ? 0.0f : static_cast<float>(value));
    }
  }
  return values;
}

}  // namespace treadle
