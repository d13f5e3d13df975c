// What tells one model from another: the SHA-256 of the files that hold its weights, or, of random
// weights, of what they are made by.
//
// Thread safety: any thread. A file is read once per process, and again if it has changed.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

// 64 hexadecimal digits: of the only file, or of the files' sums in order, or of the recipe.
absl::StatusOr<std::string> Fingerprint(const Checkpoint& checkpoint);

}  // namespace treadle
