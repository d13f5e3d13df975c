// UTF-8 and the few character properties that tokenizers and templates need. Stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace treadle {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

// What stands at the front of some bytes. `length` is that of the character, of the longest prefix
// that could have begun one (kInvalid: the Unicode standard's "maximal subpart"), or of all bytes
// (kIncomplete: more may make it a character). kEnd for no bytes.
struct Utf8Front {
  enum class Kind { kEnd, kCharacter, kInvalid, kIncomplete };
  Kind kind = Kind::kEnd;
  size_t length = 0;
  char32_t character = 0;
};
Utf8Front ReadUtf8(std::string_view bytes);

// Offset of the first byte that is not part of valid UTF-8; npos if there is none.
size_t FindInvalidUtf8(std::string_view text);

void AppendUtf8(char32_t character, std::string* out);

// Number of characters of valid UTF-8.
size_t CountCharacters(std::string_view text);

// The White_Space property.
bool IsWhiteSpace(char32_t character);

// Valid UTF-8 in normalization form C (Unicode Standard Annex 15), which some models' authors
// apply.
std::string NormalizeNfc(std::string_view text);

}  // namespace treadle
