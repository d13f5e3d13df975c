// Reading UTF-8, and text that somebody else wrote. Stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace treadle {

// The character at the front of bytes. `length` is that of the character, of the longest prefix
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

// Text from outside, for a line that people read: what moves a cursor, ends a line, turns the
// direction of writing or is no UTF-8 becomes \xNN for each byte.
std::string Printable(std::string_view text);

// As much of the text as `bytes` hold with an ellipsis, cut before a character; all of it if it
// fits.
std::string Cut(std::string_view text, size_t bytes);

}  // namespace treadle
