// Floats as messages carry them. Thread safety: pure functions.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "base/status.h"

namespace treadle {

static_assert(std::endian::native == std::endian::little);

inline std::string ToBytes(std::span<const float> floats) {
  const auto bytes = std::as_bytes(floats);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// InvalidArgument if there are not as many. what: "hidden states".
inline absl::Status FromBytes(const std::string& bytes, const char* what, std::span<float> floats) {
  if (bytes.size() != floats.size_bytes()) {
    return InvalidArgument(what, " of ", bytes.size(), " bytes, expected ", floats.size_bytes());
  }
  std::ranges::copy(std::as_bytes(std::span(bytes)), std::as_writable_bytes(floats).begin());
  return absl::OkStatus();
}

}  // namespace treadle
