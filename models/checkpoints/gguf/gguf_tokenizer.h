// tokenizer.ggml.* of a GGUF file -> TokenizerSpec.
#pragma once

#include <optional>

#include "models/checkpoints/gguf/gguf_file.h"
#include "models/text/tokenizer_spec.h"

namespace treadle {

// Nothing if the file has no tokenizer; an error that names the key if it contradicts itself.
absl::StatusOr<std::optional<TokenizerSpec>> ReadGgufTokenizer(const GgufFile& file);

}  // namespace treadle
