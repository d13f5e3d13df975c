#include "models/text/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

namespace treadle {
namespace {

uint16_t CombiningClass(utf8proc_int32_t character) {
  return static_cast<uint16_t>(utf8proc_get_property(character)->combining_class);
}

void AppendDecomposed(char32_t character, std::vector<utf8proc_int32_t>* out) {
  utf8proc_int32_t parts[4];  // no canonical decomposition is longer
  int boundary_class = 0;     // of graphemes, which we do not ask for
  const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(character), parts, 4,
                                             UTF8PROC_DECOMPOSE, &boundary_class);
  out->insert(out->end(), parts, parts + count);
}

// Sorts every run of marks by class. The library would sort them too, but by neighbours, which is
// quadratic: hours for a hostile text.
void OrderMarks(std::vector<utf8proc_int32_t>* text) {
  const auto starts = [](utf8proc_int32_t c) { return CombiningClass(c) == 0; };
  for (auto at = text->begin(); at != text->end();) {
    const auto end = std::find_if(at, text->end(), starts);
    std::ranges::stable_sort(at, end, {}, CombiningClass);
    at = std::find_if_not(end, text->end(), starts);
  }
}

}  // namespace

void AppendUtf8(char32_t character, std::string* out) {
  utf8proc_uint8_t bytes[4];
  const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(character), bytes);
  out->append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(length));
}

size_t CountCharacters(std::string_view text) {
  size_t count = 0;
  for (char c : text) count += (static_cast<uint8_t>(c) & 0xC0) != 0x80;
  return count;
}

bool IsWhiteSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

std::string NormalizeNfc(std::string_view text) {
  // Nothing below U+0300, whose first byte is 0xCC, takes part in a composition by itself.
  const auto simple = [](char byte) { return static_cast<uint8_t>(byte) < 0xCC; };
  if (std::ranges::all_of(text, simple)) return std::string(text);
  std::vector<utf8proc_int32_t> characters;
  for (size_t at = 0; at < text.size();) {
    const Utf8Front front = ReadUtf8(text.substr(at));
    AppendDecomposed(front.character, &characters);
    at += front.length;
  }
  OrderMarks(&characters);
  const auto length =
      utf8proc_normalize_utf32(characters.data(), static_cast<utf8proc_ssize_t>(characters.size()),
                               static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  characters.resize(static_cast<size_t>(length));
  std::string out;
  out.reserve(text.size());
  for (const auto character : characters) AppendUtf8(static_cast<char32_t>(character), &out);
  return out;
}

}  // namespace treadle
