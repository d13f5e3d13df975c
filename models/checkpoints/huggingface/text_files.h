// The files of a Hugging Face folder beside weights: tokenizer, chat template, generation settings.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/folder_files.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

// Whether a tensor of a folder, whose name has no suffix, is one number of a layer: Gemma 4's
// factor of the residual stream, or those of Apertus' activation.
inline bool IsNumber(std::string_view name) {
  if (name.ends_with(".weight")) return false;
  return name.ends_with(".layer_scalar") || name.find(".act_fn.") != name.npos;
}

// Opens them; without config.json, which describes weights, and without empty files. Somebody else
// made the folder: InvalidArgument if a link leads out of it.
absl::StatusOr<TextFiles> ReadTextFiles(FolderFiles& files);

// Their contents by name. Errors: those of `files`; MappedFile::CheckUnchanged's.
absl::StatusOr<std::map<std::string, std::string>> ContentsOf(
    const absl::StatusOr<TextFiles>& files);

}  // namespace treadle
