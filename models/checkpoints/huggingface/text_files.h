// The files of a Hugging Face folder beside weights: tokenizer, chat template, generation settings.
#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"

namespace treadle {

// By name; without config.json, which describes weights, and without empty files. Somebody else
// made the folder: InvalidArgument if a link leads out of it.
absl::StatusOr<std::map<std::string, std::string>> ReadTextFiles(const std::string& folder);

}  // namespace treadle
