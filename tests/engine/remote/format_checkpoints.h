// Small checkpoints of two layers or more, one for each way in which weights can be stored.
//
// Thread safety: one thread.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

struct FormatCheckpoint {
  std::string name;  // letters, digits and underscores
  // Writes it into an empty folder; its path.
  std::function<absl::StatusOr<std::string>(const std::string& folder)> write;
};

// All GGUF types with random blocks, what `treadle quantize` makes, the oracles' checkpoints, and
// one of each architecture.
std::vector<FormatCheckpoint> FormatCheckpoints();

}  // namespace treadle
