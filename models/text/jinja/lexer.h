// Cuts a template into text and the tokens inside its tags.
//
// Whitespace as transformers sets it: a newline after a tag goes (trim_blocks), and so does white
// space between a line's beginning and a tag (lstrip_blocks); '-' and '+' at a tag's edge override.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "models/text/jinja/value.h"

namespace treadle::jinja {

struct Token {
  enum class Kind {
    kText,
    kOpenOutput,
    kCloseOutput,
    kOpenTag,
    kCloseTag,
    kName,
    kInteger,
    kFloat,
    kString,
    kOperator,
    kEnd
  };
  Kind kind;
  std::string text;  // a string's is unescaped
  int line;

  bool Is(std::string_view op) const { return kind == Kind::kOperator && text == op; }
  bool IsName(std::string_view name) const { return kind == Kind::kName && text == name; }
};

// Throws TemplateError. The last token is kEnd.
std::vector<Token> Tokenize(std::string_view source);

}  // namespace treadle::jinja
