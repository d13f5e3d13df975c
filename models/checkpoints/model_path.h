// Names and mistakes in the path under which a user names a model. Pure but for the file system;
// any thread.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"

namespace treadle {

// Bytes of a model's name in messages, labels and reports: whoever made the file chose it.
inline constexpr size_t kMaxModelName = 200;

// The model's name as its user would type it: a file's without ".gguf" and the
// number of its part, a folder's own, and of a
// folder in the cache of Hugging Face's hub (models--ORG--NAME/snapshots/COMMIT) "ORG/NAME".
std::string ModelNameOf(const std::string& path);

// Why there is no model at `path`, where no file is, and what to name instead: where `path` is
// ORG/NAME, its folder in the hub's cache (HF_HUB_CACHE, HF_HOME, ~/.cache/huggingface).
absl::Status NoModelAt(const std::string& path);

}  // namespace treadle
