#include "server/constraint/pattern.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "base/status.h"

namespace treadle {
namespace {

// The size of what has been read of a pattern or grammar, group by group.
class Expansion {
 public:
  explicit Expansion(double classes) : open_{{.classes = classes}} {}

  void AddClass() { Add({1, 1}); }
  void AddCharacters(size_t count) { Add({static_cast<double>(count) / 16, 1}); }
  absl::Status Open() {
    open_.emplace_back();
    if (open_.size() <= kMaxPatternDepth) return absl::OkStatus();
    return InvalidArgument("has more than ", kMaxPatternDepth, " groups in each other");
  }
  // False if nothing is open.
  bool Close() {
    if (open_.size() == 1) return false;
    const Part group = open_.back();
    open_.pop_back();
    Add(group);
    return true;
  }
  // Repeats what was added last.
  void Repeat(double times) {
    if (times <= 1) return;
    open_.back().classes += last_.classes * (times - 1);
    last_.repetitions *= times;
    open_.back().repetitions = std::max(open_.back().repetitions, last_.repetitions);
  }
  absl::Status Check(size_t at) const {
    const Part& part = open_.back();
    if (part.repetitions > kMaxRepetitions) {
      return InvalidArgument("has repetitions that multiply to more than ",
                             static_cast<int>(kMaxRepetitions), ", up to byte ", at);
    }
    if (part.classes > kMaxClasses) {
      return InvalidArgument("has more than ", static_cast<int>(kMaxClasses),
                             " classes of characters, counted as often as they are repeated, up to "
                             "byte ",
                             at);
    }
    return absl::OkStatus();
  }
  // The next rule, in which what came before may be.
  void NextRule() { before_ *= std::exchange(open_.front().repetitions, 1); }
  double repetitions() const { return before_ * open_.front().repetitions; }
  double classes() const { return open_.front().classes; }
  bool closed() const { return open_.size() == 1; }

 private:
  struct Part {
    double classes = 0;
    double repetitions = 1;  // in each other
  };
  void Add(const Part& part) {
    last_ = part;
    open_.back().classes += part.classes;
    open_.back().repetitions = std::max(open_.back().repetitions, part.repetitions);
  }

  std::vector<Part> open_;  // each open group, the whole first
  Part last_;
  double before_ = 1;
};

// Reads {m}, {m,} or {m,n} from text[at], a brace, on; the last count, or one more than m.
// Nothing if it is none of them.
std::optional<double> ReadCounts(std::string_view text, size_t& at) {
  double least = 0, most = 0;
  size_t i = at + 1;
  const auto digits = [&](double& to) {
    const size_t begin = i;
    for (; i < text.size() && std::isdigit(static_cast<unsigned char>(text[i])); ++i) {
      to = to * 10 + (text[i] - '0');
    }
    return i - begin;
  };
  const auto blanks = [&] {
    while (i < text.size() && text[i] == ' ') ++i;
  };
  blanks();
  if (digits(least) == 0) return std::nullopt;
  blanks();
  most = least;
  if (i < text.size() && text[i] == ',') {
    ++i;
    blanks();
    most = 0;
    if (digits(most) == 0) most = least + 1;
    blanks();
  }
  if (i == text.size() || text[i] != '}') return std::nullopt;
  at = i + 1;
  return std::max(least, most);
}

// The byte after a class that begins at text[at], or npos.
size_t EndOfClass(std::string_view text, size_t at) {
  for (size_t i = at + 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == ']' && i > at + 1) {
      return i + 1;
    }
  }
  return std::string_view::npos;
}

// Escapes that mean what ECMAScript says. The library takes the others for the letter itself.
bool IsKnownEscape(char letter) {
  return std::isalnum(static_cast<unsigned char>(letter)) == 0 ||
         std::string_view("dDwWsSnrtfvxu0").find(letter) != std::string_view::npos;
}

// Macros of the library's grammars beyond EBNF: their cost is not ours to know.
constexpr std::string_view kMacros[] = {"TagDispatch",      "Token", "ExcludeToken",
                                        "TokenTagDispatch", "Regex", "Substring"};

absl::Status CheckEscapes(std::string_view text, size_t at) {
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    if (text[i] != '\\') continue;
    if (!IsKnownEscape(text[i + 1])) {
      return InvalidArgument("has \\", std::string(1, text[i + 1]), " at byte ", at + i,
                             ", which cannot be enforced");
    }
    ++i;
  }
  return absl::OkStatus();
}

size_t EscapeSize(std::string_view text) {
  size_t size = 2;
  if (text.starts_with("\\u{")) {
    size = text.find('}') == text.npos ? text.size() : text.find('}') + 1;
  } else if (text.size() > 1) {
    size = text[1] == 'u' ? 6 : text[1] == 'x' ? 4 : text[1] == 'c' ? 3 : 2;
  }
  return std::min(size, text.size());
}

// Whether a part of a pattern is one character, alone or in a class, that JSON has as an escape.
bool IsEscapedInJson(std::string_view part) {
  if (part.starts_with("[^")) return false;
  if (part.starts_with('[')) part = part.substr(1, part.size() - 2);
  if (part.size() == 1) return static_cast<unsigned char>(part[0]) < 0x20 || part[0] == '"';
  if (!part.starts_with('\\') || EscapeSize(part) != part.size()) return false;
  if (part[1] != 'x' && part[1] != 'u')
    return std::string_view("tnrfv0c\"\\").find(part[1]) != std::string_view::npos;
  int64_t code = 0;
  for (const char c : part.substr(2)) {
    if (std::isxdigit(static_cast<unsigned char>(c)) == 0) continue;
    code =
        code * 16 + (std::isdigit(static_cast<unsigned char>(c)) ? c - '0' : (c | 32) - 'a' + 10);
  }
  return code < 0x20 || code == '"' || code == '\\';
}

}  // namespace

absl::StatusOr<std::string> PreparePattern(std::string_view pattern, double& classes, Text text) {
  std::string prepared;
  Expansion expansion(classes);
  for (size_t i = 0; i < pattern.size();) {
    const size_t begin = i;
    const char c = pattern[i];
    if (c == '\\') {
      i += EscapeSize(pattern.substr(i));
      TREADLE_RETURN_IF_ERROR(CheckEscapes(pattern.substr(begin, 2), begin));
      expansion.AddClass();
    } else if (c == '[') {
      i = EndOfClass(pattern, i);
      if (i == std::string_view::npos) {
        return InvalidArgument("has a class without an end at byte ", begin);
      }
      TREADLE_RETURN_IF_ERROR(CheckEscapes(pattern.substr(begin, i - begin), begin));
      expansion.AddClass();
    } else if (c == '(') {
      TREADLE_RETURN_IF_ERROR(expansion.Open());
      ++i;
    } else if (c == ')') {
      if (!expansion.Close()) return InvalidArgument("closes no group at byte ", begin);
      ++i;
    } else if (c == '{') {
      const std::optional<double> times = ReadCounts(pattern, i);
      if (!times) return InvalidArgument("has no counts in braces at byte ", begin);
      expansion.Repeat(*times);
    } else if ((c == '^' && i > 0) || (c == '$' && i + 1 < pattern.size())) {
      return InvalidArgument("has ", std::string(1, c), " at byte ", begin,
                             ", which can be enforced at its ends alone");
    } else {
      ++i;
      if (c == '.') {
        expansion.AddClass();
      } else if (std::string_view("*+?|^$").find(c) == std::string_view::npos) {
        expansion.AddCharacters(1);
      }
    }
    TREADLE_RETURN_IF_ERROR(expansion.Check(begin));
    if (text == Text::kJsonString && IsEscapedInJson(pattern.substr(begin, i - begin))) {
      return InvalidArgument("has a character at byte ", begin,
                             " that is an escape in JSON, which cannot be enforced");
    }
    // The library's own "." would be a line's end, too.
    prepared += c == '.' ? "[^\\n\\r\\u2028\\u2029]" : pattern.substr(begin, i - begin);
  }
  if (!expansion.closed()) return InvalidArgument("has a group without an end");
  classes = expansion.classes();
  return prepared;
}

absl::Status CheckGrammarText(std::string_view text) {
  Expansion expansion(0);
  for (size_t i = 0; i < text.size();) {
    const size_t begin = i;
    const char c = text[i];
    if (c == '#') {
      i = std::min(text.find('\n', i), text.size());
    } else if (c == '"') {
      for (++i; i < text.size() && text[i] != '"'; ++i) i += text[i] == '\\' ? 1 : 0;
      i = std::min(i + 1, text.size());
      expansion.AddCharacters(i - begin);
    } else if (c == '[') {
      i = std::min(EndOfClass(text, i), text.size());
      expansion.AddClass();
    } else if (c == '(') {
      TREADLE_RETURN_IF_ERROR(expansion.Open());
      ++i;
    } else if (c == ')') {
      expansion.Close();  // what is wrong with it, the library says
      ++i;
    } else if (c == '{') {
      if (const std::optional<double> times = ReadCounts(text, i)) expansion.Repeat(*times);
      if (i == begin) ++i;
    } else if (std::isalpha(static_cast<unsigned char>(c)) || c == '_') {
      while (i < text.size() && (std::isalnum(static_cast<unsigned char>(text[i])) ||
                                 std::string_view("_-.").find(text[i]) != text.npos)) {
        ++i;
      }
      const std::string_view name = text.substr(begin, i - begin);
      if (std::ranges::find(kMacros, name) != std::end(kMacros)) {
        return InvalidArgument("has ", name, " at byte ", begin, ", which is not supported");
      }
      expansion.AddCharacters(1);
    } else {
      if (text.substr(i).starts_with("::=")) expansion.NextRule();
      ++i;
    }
    TREADLE_RETURN_IF_ERROR(expansion.Check(begin));
  }
  if (expansion.repetitions() <= kMaxRepetitions) return absl::OkStatus();
  return InvalidArgument("has rules whose repetitions multiply to more than ",
                         static_cast<int>(kMaxRepetitions), " together");
}

}  // namespace treadle
