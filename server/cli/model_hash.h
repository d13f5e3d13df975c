// Whether a model file is the one that was meant.
//
// Thread safety: pure, but for the file.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace treadle {

// InvalidArgument if `path` is no file, or if its SHA-256 is not `expected` (lower case).
absl::Status CheckModelHash(const std::string& path, const std::string& expected);

}  // namespace treadle
