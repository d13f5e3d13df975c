// How launches are made, by the environment: what the first runs on a new kind of GPU compare
// (bench/gpu_run.sh). The defaults are what is thought best.
#pragma once

#include <cstdlib>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/status.h"

namespace treadle::cuda {

struct LaunchSettings {
  // TREADLE_CUDA_EARLY_LAUNCHES=off: none begins before those before it have ended.
  bool early = true;
  // TREADLE_CUDA_CARVE_OUT: the share of L1 that is shared memory, in percent; -1: as the driver
  // chooses.
  int carve_out = -1;
};

// Errors name the variable and what it may be.
inline absl::StatusOr<LaunchSettings> ReadLaunchSettings() {
  LaunchSettings settings;
  if (const char* early = std::getenv("TREADLE_CUDA_EARLY_LAUNCHES"); early != nullptr) {
    settings.early = std::string_view(early) == "on";
    if (!settings.early && std::string_view(early) != "off") {
      return InvalidArgument("TREADLE_CUDA_EARLY_LAUNCHES is '", early, "', expected on or off");
    }
  }
  if (const char* share = std::getenv("TREADLE_CUDA_CARVE_OUT"); share != nullptr) {
    char* end = nullptr;
    const long percent = std::strtol(share, &end, 10);
    if (*share == '\0' || *end != '\0' || percent < 0 || percent > 100) {
      return InvalidArgument("TREADLE_CUDA_CARVE_OUT is '", share, "', expected 0 to 100 percent");
    }
    settings.carve_out = static_cast<int>(percent);
  }
  return settings;
}

}  // namespace treadle::cuda
