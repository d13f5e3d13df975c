// Duties of any tokenizer with any text, for the targets that make tokenizers.
#pragma once

#include <string_view>

#include "models/text/tokenizer.h"

namespace treadle {

// Encodes and decodes `text`, and ids that are none.
void UseTokenizer(const Tokenizer& tokenizer, std::string_view text);

}  // namespace treadle
