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

// Valid UTF-8 with all characters' full case mappings (The Unicode Standard, section 3.13), as
// Python's str.upper and str.lower have them.
std::string UpperCase(std::string_view text);
std::string LowerCase(std::string_view text);
// The first character in title case, the others small: str.capitalize.
std::string Capitalized(std::string_view text);
// Each run of letters that have cases so: str.title.
std::string TitleCase(std::string_view text);

// Whether Python's repr writes a character as it is: neither a control, format or private
// character, nor a separator but the space, nor unassigned.
bool IsPrintable(char32_t character);

// A letter, mark, digit, connector or joiner: \w of Unicode Technical Standard 18, annex C.
bool IsWordCharacter(char32_t character);

// Valid UTF-8 in normalization form C (Unicode Standard Annex 15), which some models' authors
// apply.
std::string NormalizeNfc(std::string_view text);

}  // namespace treadle
