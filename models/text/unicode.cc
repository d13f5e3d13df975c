#include "models/text/unicode.h"

namespace treadle {
namespace {

// Bytes after the lead byte, and the range of the first of them (Unicode standard, table 3-7). The
// range is what keeps overlong forms, surrogates and values past U+10FFFF out.
struct Lead {
  int continuations = -1;
  uint8_t low = 0x80;
  uint8_t high = 0xBF;
};

Lead ClassifyLead(uint8_t byte) {
  if (byte < 0x80) return {0};
  if (byte < 0xC2) return {-1};
  if (byte < 0xE0) return {1};
  if (byte < 0xF0) {
    return {2, static_cast<uint8_t>(byte == 0xE0 ? 0xA0 : 0x80),
            static_cast<uint8_t>(byte == 0xED ? 0x9F : 0xBF)};
  }
  if (byte < 0xF5) {
    return {3, static_cast<uint8_t>(byte == 0xF0 ? 0x90 : 0x80),
            static_cast<uint8_t>(byte == 0xF4 ? 0x8F : 0xBF)};
  }
  return {-1};
}

}  // namespace

Utf8Front ReadUtf8(std::string_view bytes) {
  using Kind = Utf8Front::Kind;
  if (bytes.empty()) return {};
  const auto first = static_cast<uint8_t>(bytes[0]);
  const Lead lead = ClassifyLead(first);
  if (lead.continuations < 0) return {Kind::kInvalid, 1, 0};
  if (lead.continuations == 0) return {Kind::kCharacter, 1, first};
  char32_t character = first & (0x3F >> lead.continuations);
  for (int i = 1; i <= lead.continuations; ++i) {
    const auto at = static_cast<size_t>(i);
    if (at >= bytes.size()) return {Kind::kIncomplete, at, 0};
    const auto byte = static_cast<uint8_t>(bytes[at]);
    const uint8_t low = i == 1 ? lead.low : 0x80;
    const uint8_t high = i == 1 ? lead.high : 0xBF;
    if (byte < low || byte > high) return {Kind::kInvalid, at, 0};
    character = (character << 6) | (byte & 0x3F);
  }
  return {Kind::kCharacter, static_cast<size_t>(lead.continuations) + 1, character};
}

size_t FindInvalidUtf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8Front front = ReadUtf8(text.substr(at));
    if (front.kind != Utf8Front::Kind::kCharacter) return at;
    at += front.length;
  }
  return std::string_view::npos;
}

void AppendUtf8(char32_t character, std::string* out) {
  const auto put = [out](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (character < 0x80) {
    put(character);
  } else if (character < 0x800) {
    put(0xC0 | (character >> 6));
    put(0x80 | (character & 0x3F));
  } else if (character < 0x10000) {
    put(0xE0 | (character >> 12));
    put(0x80 | ((character >> 6) & 0x3F));
    put(0x80 | (character & 0x3F));
  } else {
    put(0xF0 | (character >> 18));
    put(0x80 | ((character >> 12) & 0x3F));
    put(0x80 | ((character >> 6) & 0x3F));
    put(0x80 | (character & 0x3F));
  }
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

}  // namespace treadle
