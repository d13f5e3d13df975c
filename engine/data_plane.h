// What carries activations between stages. Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace treadle {

// kGloo: through the hosts (ActivationLink on StagingPlace::kHost), on any device.
// kNccl: from GPU to GPU (StagingPlace::kDevice), as f32.
enum class DataPlane : uint8_t { kGloo, kNccl };
inline constexpr std::string_view kDataPlaneNames[] = {"gloo", "nccl"};
constexpr std::string_view Name(DataPlane plane) {
  return kDataPlaneNames[static_cast<size_t>(plane)];
}
constexpr std::optional<DataPlane> DataPlaneFrom(std::string_view name) {
  for (const DataPlane plane : {DataPlane::kGloo, DataPlane::kNccl}) {
    if (Name(plane) == name) return plane;
  }
  return std::nullopt;
}

}  // namespace treadle
