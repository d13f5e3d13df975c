#include "models/text/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "absl/strings/ascii.h"
#include "models/text/special_casing.h"

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

enum class Case { kUpper, kLower, kTitle };

void AppendCased(char32_t character, Case to, std::string* out) {
  if (character < 0x80) {
    const char c = static_cast<char>(character);
    out->push_back(to == Case::kLower ? absl::ascii_tolower(c) : absl::ascii_toupper(c));
    return;
  }
  const auto c = static_cast<utf8proc_int32_t>(character);
  if (to == Case::kLower) {
    if (character == 0x130) {  // a dotted capital I, the one whose small form is two characters
      *out += "i\u0307";
    } else {
      AppendUtf8(static_cast<char32_t>(utf8proc_tolower(c)), out);
    }
    return;
  }
  const auto* const special =
      std::ranges::lower_bound(kSpecialCasing, character, {}, &SpecialCasing::character);
  if (special != std::end(kSpecialCasing) && special->character == character) {
    *out += to == Case::kUpper ? special->upper : special->title;
  } else {
    const auto mapped = to == Case::kUpper ? utf8proc_toupper(c) : utf8proc_totitle(c);
    AppendUtf8(static_cast<char32_t>(mapped), out);
  }
}

bool IsCased(char32_t character) {
  if (character < 0x80) return absl::ascii_isalpha(static_cast<unsigned char>(character));
  const auto c = static_cast<utf8proc_int32_t>(character);
  return utf8proc_islower(c) != 0 || utf8proc_isupper(c) != 0 ||
         utf8proc_category(c) == UTF8PROC_CATEGORY_LT;
}

// Marks and signs that a word may hold between its letters: the property Case_Ignorable, as far as
// general categories say it, and Word_Break's MidLetter, MidNumLet and Single_Quote.
bool IsCaseIgnorable(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
      return true;
    default:
      return std::u32string_view(
                 U"'.:\u00B7\u0387\u055F\u05F4\u2018\u2019\u2024\u2027\uFE13\uFE52"
                 U"\uFE55\uFF07\uFF0E\uFF1A")
                 .find(c) != std::u32string_view::npos;
  }
}

bool LetterFollows(std::string_view text) {
  while (!text.empty()) {
    const Utf8Front front = ReadUtf8(text);
    if (IsCased(front.character)) return true;
    if (!IsCaseIgnorable(front.character)) return false;
    text.remove_prefix(front.length);
  }
  return false;
}

constexpr char32_t kSigma = 0x3A3, kFinalSigma = 0x3C2;

// `to_first` for the first of each word; words are runs of cased letters, or all of the text.
std::string Cased(std::string_view text, Case to_first, bool words, Case to_others) {
  std::string out;
  bool first = true;
  bool after_letter = false;  // a cased one before, and ignorable ones since
  for (size_t at = 0; at < text.size();) {
    const Utf8Front front = ReadUtf8(text.substr(at));
    const char32_t c = front.character;
    at += front.length;
    const Case to = first ? to_first : to_others;
    if (c == kSigma && to == Case::kLower && after_letter && !LetterFollows(text.substr(at))) {
      AppendUtf8(kFinalSigma, &out);
    } else {
      AppendCased(c, to, &out);
    }
    const bool cased = IsCased(c);
    first = words && !cased;
    if (cased || !IsCaseIgnorable(c)) after_letter = cased;
  }
  return out;
}

}  // namespace

std::string UpperCase(std::string_view text) {
  return Cased(text, Case::kUpper, /*words=*/false, Case::kUpper);
}
std::string LowerCase(std::string_view text) {
  return Cased(text, Case::kLower, /*words=*/false, Case::kLower);
}
std::string Capitalized(std::string_view text) {
  return Cased(text, Case::kTitle, /*words=*/false, Case::kLower);
}
std::string TitleCase(std::string_view text) {
  return Cased(text, Case::kTitle, /*words=*/true, Case::kLower);
}

bool IsWordCharacter(char32_t character) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(character))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return character == 0x200C || character == 0x200D ||
             (character >= 0x24B6 && character <= 0x24E9) ||  // letters in circles and squares
             (character >= 0x1F130 && character <= 0x1F149) ||
             (character >= 0x1F150 && character <= 0x1F169) ||
             (character >= 0x1F170 && character <= 0x1F189);
  }
}

bool IsPrintable(char32_t character) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(character))) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    case UTF8PROC_CATEGORY_ZS:
      return character == ' ';
    default:
      return true;
  }
}

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
