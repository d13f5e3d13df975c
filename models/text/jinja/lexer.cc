#include <algorithm>
#include <charconv>

#include "models/text/jinja/expression_parser.h"
#include "models/text/jinja/library.h"
#include "models/text/unicode.h"

namespace treadle::jinja {
namespace {

using Kind = Token::Kind;
bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsNameStart(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
// The bytes of white space at the front, as Python's regular expressions see it.
size_t Blank(std::string_view text) {
  return text.size() - Strip(text, Side::kLeft, nullptr).size();
}

// One kind of line end, and one of them less at the end of the file.
std::string NormalizeLines(std::string_view source) {
  std::string out;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out.push_back('\n');
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out.push_back(source[i]);
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : text_(NormalizeLines(source)) {}

  std::vector<Token> Run() {
    while (at_ < text_.size()) {
      const size_t open = FindTag();
      LexText(open);
      if (open < text_.size()) LexTag();
    }
    Add(Kind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  template <typename... Parts>
  [[noreturn]] void Fail(const Parts&... parts) const {
    throw TemplateError{line_, Str(parts...)};
  }
  void Add(Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
  char Peek(size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }
  void Advance(size_t count) {
    const auto begin = text_.begin() + static_cast<ptrdiff_t>(at_);
    line_ += static_cast<int>(std::count(begin, begin + static_cast<ptrdiff_t>(count), '\n'));
    at_ += count;
  }
  std::string_view Rest() const { return std::string_view(text_).substr(at_); }

  size_t FindTag() const {
    for (size_t i = at_; i + 1 < text_.size(); ++i) {
      if (text_[i] == '{' && (text_[i + 1] == '{' || text_[i + 1] == '%' || text_[i + 1] == '#')) {
        return i;
      }
    }
    return text_.size();
  }

  // Text up to the tag at `open`, less what the tag's edge takes away.
  void LexText(size_t open) {
    std::string_view text = std::string_view(text_).substr(at_, open - at_);
    std::string_view kept = text;
    if (open < text_.size()) {
      const char edge = open + 2 < text_.size() ? text_[open + 2] : '\0';
      if (edge == '-') {
        kept = Strip(kept, Side::kRight, nullptr);
      } else if (edge != '+' && text_[open + 1] != '{') {
        const size_t start = text.rfind('\n') + 1;  // npos + 1 is 0
        const bool blank = start + Blank(text.substr(start)) == text.size();
        if (blank && (start > 0 || line_starts_)) kept = text.substr(0, start);
      }
    }
    if (!kept.empty()) Add(Kind::kText, std::string(kept));
    Advance(text.size());
  }

  void LexTag() {
    const char kind = text_[at_ + 1];
    Advance(2);
    if (Peek() == '-' || Peek() == '+') Advance(1);
    if (kind == '#') return LexComment();
    const bool output = kind == '{';
    Add(output ? Kind::kOpenOutput : Kind::kOpenTag, "");
    const std::string_view close = output ? "}}" : "%}";
    brackets_.clear();
    for (;;) {
      Advance(Blank(Rest()));
      if (at_ >= text_.size()) Fail("the tag is not closed, expected '", close, "'");
      if (brackets_.empty() && Closes(close)) {
        Add(output ? Kind::kCloseOutput : Kind::kCloseTag, "");
        return Close(close, /*trims_line=*/!output);
      }
      LexToken();
    }
  }

  bool Closes(std::string_view close) const {
    const bool signed_edge = Peek() == '-' || (Peek() == '+' && close[0] != '}');
    return Rest().substr(signed_edge ? 1 : 0).starts_with(close);
  }

  void Close(std::string_view close, bool trims_line) {
    const char edge = Peek();
    const bool signed_edge = edge == '-' || edge == '+';
    Advance(close.size() + (signed_edge ? 1 : 0));
    const size_t after = at_;
    if (edge == '-') {
      Advance(Blank(Rest()));
    } else if (edge != '+' && trims_line && Peek() == '\n') {
      Advance(1);
    }
    line_starts_ = at_ > after && text_[at_ - 1] == '\n';
  }

  void LexComment() {
    const size_t end = text_.find("#}", at_);
    if (end == std::string::npos) Fail("the comment is not closed, expected '#}'");
    const char last = end > at_ ? text_[end - 1] : '\0';
    Advance(end - at_ - (last == '-' || last == '+' ? 1 : 0));
    Close("#}", /*trims_line=*/true);
  }

  void LexToken() {
    const char c = Peek();
    if (IsNameStart(c)) return LexWhile(Kind::kName);
    if (IsDigit(c)) return LexNumber();
    if (c == '\'' || c == '"') return LexString();
    static constexpr std::string_view kPairs[] = {"//", "**", "==", "!=", "<=", ">="};
    for (std::string_view pair : kPairs) {
      if (Rest().starts_with(pair)) return AddOperator(pair);
    }
    if (std::string_view("+-/*%~()[]{}<>=.:|,").find(c) == std::string_view::npos) {
      Fail("unexpected character '", c, "'");
    }
    AddOperator(Rest().substr(0, 1));
  }

  void AddOperator(std::string_view op) {
    const char c = op[0];
    if (c == '(' || c == '[' || c == '{') brackets_.push_back(c == '(' ? ')' : c + 2);
    if (c == ')' || c == ']' || c == '}') {
      if (brackets_.empty() || brackets_.back() != c) Fail("unexpected '", c, "'");
      brackets_.pop_back();
    }
    Add(Kind::kOperator, std::string(op));
    Advance(op.size());
  }

  void LexWhile(Kind kind) {
    size_t length = 1;
    while (IsNameStart(Peek(length)) || IsDigit(Peek(length))) ++length;
    Add(kind, std::string(Rest().substr(0, length)));
    Advance(length);
  }

  void LexNumber() {
    size_t length = 0;
    const auto digits = [&] {
      while (IsDigit(Peek(length)) || (length > 0 && Peek(length) == '_')) ++length;
    };
    digits();
    const size_t whole = length;
    if (Peek(length) == '.' && IsDigit(Peek(length + 1))) {
      ++length;
      digits();
    }
    const size_t sign = Peek(length + 1) == '+' || Peek(length + 1) == '-' ? 1 : 0;
    if ((Peek(length) == 'e' || Peek(length) == 'E') && IsDigit(Peek(length + 1 + sign))) {
      length += 1 + sign;
      digits();
    }
    std::string number(Rest().substr(0, length));
    std::erase(number, '_');
    Add(length == whole ? Kind::kInteger : Kind::kFloat, number);
    Advance(length);
  }

  void LexString() {
    const char quote = Peek();
    size_t end = at_ + 1;
    while (end < text_.size() && text_[end] != quote) end += text_[end] == '\\' ? 2 : 1;
    if (end >= text_.size()) Fail("the string is not closed, expected ", quote);
    Add(Kind::kString, Unescape(std::string_view(text_).substr(at_ + 1, end - at_ - 1)));
    Advance(end + 1 - at_);
  }

  // Python's escapes. An unknown one stays as it is.
  std::string Unescape(std::string_view raw) const {
    static constexpr std::string_view kLetters = "ntr\\'\"bfav\n";
    static constexpr std::string_view kMeanings("\n\t\r\\'\"\b\f\a\v");
    std::string out;
    for (size_t i = 0; i < raw.size(); ++i) {
      if (raw[i] != '\\' || i + 1 >= raw.size()) {
        out.push_back(raw[i]);
        continue;
      }
      const char letter = raw[++i];
      const size_t digits = letter == 'x' ? 2 : letter == 'u' ? 4 : letter == 'U' ? 8 : 0;
      const size_t known = kLetters.find(letter);
      if (letter >= '0' && letter <= '7') {  // up to three octal digits
        const size_t end = std::min(raw.find_first_not_of("01234567", i), i + 3);
        const std::string_view octal = raw.substr(i, end - i);
        AppendCode(octal, octal.size(), 8, &out);
        i += octal.size() - 1;
      } else if (digits > 0) {
        AppendCode(raw.substr(i + 1, digits), digits, 16, &out);
        i += digits;
      } else if (known < kMeanings.size()) {
        out.push_back(kMeanings[known]);
      } else if (known == kLetters.npos) {
        out.push_back('\\');
        out.push_back(letter);
      }
    }
    return out;
  }

  void AppendCode(std::string_view digits, size_t expected, int base, std::string* out) const {
    uint32_t code = 0;
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), code, base);
    const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
    if (error != std::errc() || end != digits.data() + expected || code > 0x10FFFF || surrogate) {
      Fail("the escape '\\...", digits, "' names no character");
    }
    AppendUtf8(code, out);
  }

  const std::string text_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starts_ = true;  // the last tag ended with a newline, or there was none
  std::string brackets_;     // closing ones still expected in this tag
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> Tokenize(std::string_view source) { return Lexer(source).Run(); }

}  // namespace treadle::jinja
