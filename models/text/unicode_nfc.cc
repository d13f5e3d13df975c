// Normalization form C: decompose, order marks by class, compose (Unicode Standard Annex 15).
#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <vector>

#include "models/text/unicode.h"

namespace treadle {
namespace {

struct Decomposition {
  char32_t character;
  char32_t first;
  char32_t second;
  bool composes;
};
struct ClassRange {
  char32_t first;
  char32_t last;
  uint8_t value;
};
#include "models/text/unicode_nfc_tables.inc"

// Hangul syllables are composed by arithmetic (the Unicode standard, section 3.12).
constexpr char32_t kSyllables = 0xAC00, kLeads = 0x1100, kVowels = 0x1161, kTails = 0x11A7;
constexpr char32_t kLeadCount = 19, kVowelCount = 21, kTailCount = 28;
constexpr char32_t kSyllableCount = kLeadCount * kVowelCount * kTailCount;

struct Mark {
  char32_t character;
  uint8_t combining_class;
};

uint8_t CombiningClass(char32_t character) {
  const auto* range = std::ranges::lower_bound(kClassRanges, character, {}, &ClassRange::last);
  return range != std::end(kClassRanges) && range->first <= character ? range->value : 0;
}

void Decompose(char32_t character, std::vector<Mark>* out) {
  if (character >= kSyllables && character < kSyllables + kSyllableCount) {
    const char32_t index = character - kSyllables;
    out->push_back({kLeads + index / (kVowelCount * kTailCount), 0});
    out->push_back({kVowels + index / kTailCount % kVowelCount, 0});
    if (index % kTailCount != 0) out->push_back({kTails + index % kTailCount, 0});
    return;
  }
  const auto* row =
      std::ranges::lower_bound(kDecompositions, character, {}, &Decomposition::character);
  if (row == std::end(kDecompositions) || row->character != character) {
    out->push_back({character, CombiningClass(character)});
    return;
  }
  Decompose(row->first, out);
  if (row->second != 0) Decompose(row->second, out);
}

// 0 if the two do not compose.
char32_t Compose(char32_t first, char32_t second) {
  if (first >= kLeads && first < kLeads + kLeadCount && second >= kVowels &&
      second < kVowels + kVowelCount) {
    return kSyllables + ((first - kLeads) * kVowelCount + (second - kVowels)) * kTailCount;
  }
  if (first >= kSyllables && first < kSyllables + kSyllableCount &&
      (first - kSyllables) % kTailCount == 0 && second > kTails && second < kTails + kTailCount) {
    return first + (second - kTails);
  }
  static const std::unordered_map<uint64_t, char32_t> pairs = [] {
    std::unordered_map<uint64_t, char32_t> made;
    for (const Decomposition& row : kDecompositions) {
      if (row.composes) made[uint64_t{row.first} << 32 | row.second] = row.character;
    }
    return made;
  }();
  const auto found = pairs.find(uint64_t{first} << 32 | second);
  return found == pairs.end() ? 0 : found->second;
}

void OrderMarks(std::vector<Mark>* text) {
  for (auto at = text->begin(); at != text->end();) {
    if (at->combining_class == 0) {
      ++at;
      continue;
    }
    const auto end = std::find_if(at, text->end(), [](Mark m) { return m.combining_class == 0; });
    std::stable_sort(at, end, [](Mark a, Mark b) { return a.combining_class < b.combining_class; });
    at = end;
  }
}

// A mark composes with the last starter unless one of its own class or higher stands between them.
void ComposeInPlace(std::vector<Mark>* text) {
  constexpr size_t kNone = SIZE_MAX;
  size_t kept = 0;
  size_t starter = kNone;
  int last_class = -1;  // of what stands between the starter and here; -1: nothing
  for (const Mark mark : *text) {
    const bool blocked = last_class >= mark.combining_class;
    const char32_t composed =
        starter == kNone || blocked ? 0 : Compose((*text)[starter].character, mark.character);
    if (composed != 0) {
      (*text)[starter].character = composed;
      continue;
    }
    if (mark.combining_class == 0) {
      starter = kept;
      last_class = -1;
    } else {
      last_class = mark.combining_class;
    }
    (*text)[kept++] = mark;
  }
  text->resize(kept);
}

}  // namespace

std::string NormalizeNfc(std::string_view text) {
  std::vector<Mark> marks;
  bool may_change = false;  // nothing below U+0300 takes part in a composition by itself
  for (size_t at = 0; at < text.size() && !may_change;) {
    const Utf8Front front = ReadUtf8(text.substr(at));
    may_change = front.character >= 0x300;
    at += front.length;
  }
  if (!may_change) return std::string(text);
  for (size_t at = 0; at < text.size();) {
    const Utf8Front front = ReadUtf8(text.substr(at));
    Decompose(front.character, &marks);
    at += front.length;
  }
  OrderMarks(&marks);
  ComposeInPlace(&marks);
  std::string out;
  out.reserve(text.size());
  for (const Mark& mark : marks) AppendUtf8(mark.character, &out);
  return out;
}

}  // namespace treadle
