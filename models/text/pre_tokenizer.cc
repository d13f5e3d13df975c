#include "models/text/pre_tokenizer.h"

#include <algorithm>
#include <array>

#include "base/status.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace treadle {
namespace {

// The White_Space property, spelled out: PCRE2's own \s also holds U+180E, the authors' does not.
#define SPACE \
  R"(\t-\r\x20\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})"
#define SPACES "[" SPACE "]+"
// White space up to the last one before a word, which goes with the word.
#define GAP SPACES "(?![^" SPACE "])|" SPACES
#define GPT2_PATTERN \
  R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^)" SPACE R"(\p{L}\p{N}]+|)" GAP
#define LLAMA3_PATTERN(digits)                                                        \
  R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|)" digits R"(| ?[^)" SPACE \
  R"(\p{L}\p{N}]+[\r\n]*|[)" SPACE R"(]*[\r\n]+|)" GAP

// A word may begin with one other character: letters that are not small, then some that are not
// capitals, or the reverse; and an English ending.
#define GPT4O_WORD(capitals, others)                              \
  R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])" capitals \
  R"([\p{Ll}\p{Lm}\p{Lo}\p{M}])" others R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
#define GPT4O_WORDS GPT4O_WORD("*", "+") GPT4O_WORD("+", "*")

struct Row {
  std::string_view name;
  std::array<const char*, 2> patterns;  // the second may be null
  std::string_view spelling;            // in tokenizer.json's Split; "" where it has none
  bool nfc;
  bool digit_bytes = false;  // last, SplitDigitBytes
};

#define LLAMA3_SPELLING(digits)                                      \
  R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|)" digits \
  R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"

constexpr Row kRows[] = {
    {"gpt-2", {GPT2_PATTERN, nullptr}, "", false},
    {"smollm", {R"(\p{N})", GPT2_PATTERN}, "", false},
    {"llama-bpe",
     {LLAMA3_PATTERN(R"(\p{N}{1,3})"), nullptr},
     LLAMA3_SPELLING(R"(\p{N}{1,3})"),
     false},
    {"qwen2", {LLAMA3_PATTERN(R"(\p{N})"), nullptr}, LLAMA3_SPELLING(R"(\p{N})"), true},
    // OpenAI's o200k.
    {"gpt-4o",
     {GPT4O_WORDS R"(\p{N}{1,3}| ?[^)" SPACE R"(\p{L}\p{N}]+[\r\n/]*|[)" SPACE R"(]*[\r\n]+|)" GAP,
      nullptr},
     GPT4O_WORDS R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     false},
    // GPT-NeoX's, which OLMo took over and GGUF names it after.
    {"olmo", {GPT2_PATTERN, nullptr}, "", true},
    {"bloom",
     {R"( ?[^()" SPACE R"(|.,!?…。，、।۔،)]+)", nullptr},
     R"( ?[^(\s|[.,!?…。，、।۔،])]+)",
     false},
    {"falcon", {R"([\p{P}$+<=>^`|~]+)", GPT2_PATTERN}, "", false, true},
};

// Falcon's authors split bytes, not characters: those that GPT-2 spells as characters that count as
// numbers (digits, and 0xB2 for one, which spells U+00B2) are pieces apart from others, and of
// these every three digits are one.
void SplitDigitBytes(std::string_view piece, std::vector<std::string_view>* pieces) {
  constexpr std::string_view kNumbers = "0123456789\xB2\xB3\xB9\xBC\xBD\xBE";
  constexpr std::string_view kDigits = kNumbers.substr(0, 10);
  const auto add = [&](std::string_view text) {
    if (!text.empty()) pieces->push_back(text);
  };
  while (!piece.empty()) {
    const size_t first = std::min(piece.find_first_of(kNumbers), piece.size());
    const size_t end = std::min(piece.find_first_not_of(kNumbers, first), piece.size());
    add(piece.substr(0, first));
    std::string_view run = piece.substr(first, end - first);
    for (size_t i = 0; i + 3 <= run.size();) {
      if (run.substr(i, 3).find_first_not_of(kDigits) != run.npos) {
        ++i;
        continue;
      }
      add(run.substr(0, i));
      add(run.substr(i, 3));
      run.remove_prefix(i + 3);
      i = 0;
    }
    add(run);
    piece.remove_prefix(end);
  }
}

std::string ErrorText(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

}  // namespace

struct PreTokenizer::Pattern {
  struct Free {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
  };

  static absl::StatusOr<std::shared_ptr<const Pattern>> Compile(const char* pattern) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    auto made = std::make_shared<Pattern>();
    made->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern), PCRE2_ZERO_TERMINATED,
                                   PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr));
    if (!made->code) {
      return Internal("pre-tokenizer pattern: ", ErrorText(error), " at ", offset);
    }
    // Where the library has no JIT compiler, matching falls back to its interpreter by itself.
    pcre2_jit_compile(made->code.get(), PCRE2_JIT_COMPLETE);
    return made;
  }

  // Cuts `text` where matches begin and end.
  absl::Status Isolate(std::string_view text, pcre2_match_data* match,
                       std::vector<std::string_view>* pieces) const {
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    size_t done = 0;
    while (done < text.size()) {
      // The text was checked as a whole; checking it again at every match would be quadratic.
      const int count =
          pcre2_match(code.get(), subject, text.size(), done, PCRE2_NO_UTF_CHECK, match, nullptr);
      if (count == PCRE2_ERROR_NOMATCH) break;
      if (count < 0) {
        return ResourceExhausted("splitting the text into words at byte ", done, ": ",
                                 ErrorText(count));
      }
      const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(match);
      if (bounds[0] > done) pieces->push_back(text.substr(done, bounds[0] - done));
      pieces->push_back(text.substr(bounds[0], bounds[1] - bounds[0]));
      done = bounds[1];  // no pattern matches the empty text, so this advances
    }
    if (done < text.size()) pieces->push_back(text.substr(done));
    return absl::OkStatus();
  }

  std::unique_ptr<pcre2_code, Free> code;
};

absl::StatusOr<PreTokenizer> PreTokenizer::Create(std::string_view name) {
  std::string known;
  for (const Row& row : kRows) {
    known += Str(known.empty() ? "" : ", ", "'", row.name, "'");
    if (row.name != name) continue;
    PreTokenizer made;
    made.nfc_ = row.nfc;
    made.digit_bytes_ = row.digit_bytes;
    for (const char* pattern : row.patterns) {
      if (pattern == nullptr) continue;
      TREADLE_ASSIGN_OR_RETURN(made.patterns_.emplace_back(), Pattern::Compile(pattern));
    }
    return made;
  }
  return Unimplemented("pre-tokenizer '", name, "' is not known; known are ", known);
}

absl::Status PreTokenizer::Split(std::string_view text,
                                 std::vector<std::string_view>* words) const {
  std::vector<std::string_view> pieces = {text};
  const std::unique_ptr<pcre2_match_data, Pattern::Free> match(pcre2_match_data_create(1, nullptr));
  for (const auto& pattern : patterns_) {
    std::vector<std::string_view> finer;
    for (std::string_view piece : pieces) {
      TREADLE_RETURN_IF_ERROR(pattern->Isolate(piece, match.get(), &finer));
    }
    pieces = std::move(finer);
  }
  if (digit_bytes_) {
    for (const std::string_view piece : pieces) SplitDigitBytes(piece, words);
    return absl::OkStatus();
  }
  words->insert(words->end(), pieces.begin(), pieces.end());
  return absl::OkStatus();
}

std::string_view PreTokenizerOfPattern(std::string_view pattern) {
  for (const Row& row : kRows) {
    if (!row.spelling.empty() && row.spelling == pattern) return row.name;
  }
  return "";
}

std::string_view PatternOfPreTokenizer(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return row.spelling;
  }
  return "";
}

}  // namespace treadle
