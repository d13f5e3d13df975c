// Making UTF-8, and the few character properties that tokenizers and templates need. Stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/utf8.h"

namespace treadle {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

void AppendUtf8(char32_t character, std::string* out);

// Number of characters of valid UTF-8.
size_t CountCharacters(std::string_view text);

// The White_Space property.
bool IsWhiteSpace(char32_t character);

// Valid UTF-8 in normalization form C (Unicode Standard Annex 15), which some models' authors
// apply.
std::string NormalizeNfc(std::string_view text);

}  // namespace treadle
