#include "models/text/pre_tokenizer.h"

#include <algorithm>

#include "base/status.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace treadle {
namespace {

// The White_Space property, spelled out: PCRE2's own \s also holds U+180E, the authors' does not.
constexpr std::string_view kSpace =
    R"(\t-\r\x20\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

// `pattern` with that for \s and \S.
std::string WithSpaces(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char next = pattern[i] == '\\' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (next == 's' || next == 'S') {
      out += in_class ? std::string(kSpace) : Str(next == 's' ? "[" : "[^", kSpace, "]");
      ++i;
      continue;
    }
    out += pattern[i];
    if (next != '\0') {
      out += pattern[++i];
    } else if (pattern[i] == (in_class ? ']' : '[')) {
      in_class = !in_class;
    }
  }
  return out;
}

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

  static absl::StatusOr<std::shared_ptr<const Pattern>> Compile(const std::string& pattern) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    auto made = std::make_shared<Pattern>();
    made->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
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
  TREADLE_ASSIGN_OR_RETURN(const PreTokenizerRow* row, FindPreTokenizer(name));
  PreTokenizer made;
  made.nfc_ = row->nfc;
  made.digit_bytes_ = row->splits == "falcon";
  for (const std::string& pattern : SplitPatterns(*row)) {
    TREADLE_ASSIGN_OR_RETURN(made.patterns_.emplace_back(),
                             Pattern::Compile(WithSpaces(OwnPattern(pattern))));
  }
  return made;
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

}  // namespace treadle
