// Kimi's folders: a vocabulary of tiktoken's in place of tokenizer.json. Lines of `tiktoken.model`
// are a token's bytes in base64 and its rank, which is its id; tokens that are added are in
// tokenizer_config.json ("added_tokens_decoder"), and the pattern that cuts text is in the
// authors' code alone. A word that is a token is found by its merges, as those of trained
// vocabularies are.
//
// Thread safety: a pure function.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/folder_files.h"

namespace treadle {

inline constexpr const char* kTiktokenFile = "tiktoken.model";

// The same as tokenizer.json would say it. Each token comes with all merges that make it of two
// others, as tiktoken joins any two symbols whose join is a token. Errors name the file, and the
// line or the class of another family.
absl::StatusOr<nlohmann::json> TiktokenAsJson(FolderFiles& files);

}  // namespace treadle
