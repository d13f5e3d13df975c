#include "base/utf8.h"

#include <algorithm>

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

// Controls of both kinds, line and paragraph ends, and what turns or hides text (Unicode Standard
// Annex 9's formatting characters, zero-width ones, and the byte order mark).
bool Disturbs(char32_t c) {
  return c < 0x20 || (c >= 0x7F && c < 0xA0) || (c >= 0x200B && c <= 0x200F) ||
         (c >= 0x2028 && c <= 0x202E) || (c >= 0x2060 && c <= 0x206F) || c == 0xFEFF || c == 0x061C;
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

std::string Printable(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Utf8Front front = ReadUtf8(text);
    const std::string_view bytes = text.substr(0, front.length);
    text.remove_prefix(front.length);
    if (front.kind == Utf8Front::Kind::kCharacter && !Disturbs(front.character)) {
      out += bytes;
      continue;
    }
    for (const char c : bytes) {
      const auto byte = static_cast<unsigned char>(c);
      out += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return out;
}

std::string Cut(std::string_view text, size_t bytes) {
  constexpr std::string_view kEllipsis = "...";
  if (text.size() <= bytes) return std::string(text);
  size_t end = bytes - std::min(bytes, kEllipsis.size());
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return std::string(text.substr(0, end)) + std::string(kEllipsis);
}

}  // namespace treadle
