// What lies beside the weights in a Hugging Face folder: config.json and the text side, copied from
// a folder or made from a GGUF file's metadata.
//
// Thread safety: pure functions, but for the folder.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "base/output_file.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

// config.json of the model, without quantization_config. Errors: something that config.json cannot
// say.
absl::StatusOr<nlohmann::json> HfConfigOf(const Checkpoint& source);

// Tokenizer, chat template and generation settings.
absl::Status WriteHfTextFiles(const Checkpoint& source, const OutputFolder& folder);

}  // namespace treadle
