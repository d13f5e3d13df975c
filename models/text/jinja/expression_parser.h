// Tokens, and the expression half of the parser: recursive descent, one function per level of
// precedence.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/text/jinja/ast.h"

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

// Cuts a template into text and the tokens inside its tags. Whitespace as transformers sets it: a
// newline after a tag goes (trim_blocks), and so does white space between a line's beginning and a
// tag (lstrip_blocks); '-' and '+' at a tag's edge override. Throws TemplateError. The last token
// is kEnd.
std::vector<Token> Tokenize(std::string_view source);

class ExpressionParser {
 public:
  explicit ExpressionParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  NodePtr ParseExpression();  // with "a if b else c"
  // Expressions with commas between them are a list, as in {% set x = 1, 2 %}.
  NodePtr ParseExpressionOrList();
  NodePtr ParseOr();  // without "if"
  // As often as a filter comes; the first has no '|' before it if `!piped`.
  NodePtr ParseFilters(NodePtr input, bool piped = true);

  // Inside an {% if %} a filter or test that does not exist is an error only once it is used, as in
  // the original: templates ask first what the host can do.
  void EnterCondition() { ++conditions_; }
  void LeaveCondition() { --conditions_; }

  const Token& Here() const { return tokens_[at_]; }
  Token Next() { return Here().kind == Token::Kind::kEnd ? Here() : tokens_[at_++]; }
  int LastLine() const { return tokens_[at_ > 0 ? at_ - 1 : 0].line; }  // of what was taken last
  bool Accept(std::string_view op);
  // Whether a name comes before the next tag of another.
  bool NamesBefore(std::string_view name, std::string_view tag) const;
  bool AcceptName(std::string_view name);
  void Expect(std::string_view op);
  std::string ExpectName(const char* what);
  template <typename... Parts>
  [[noreturn]] void Fail(const Parts&... parts) const {
    throw TemplateError{Here().line, Str(parts...)};
  }
  // The next token, for messages.
  std::string Found() const;

  NodePtr Make(Node::Kind kind, std::string text = "") const;
  // Sets the depth from the children's and fails where the tree gets too deep. Call it last.
  NodePtr Seal(NodePtr node) const;

 private:
  NodePtr ParseAnd();
  NodePtr ParseNot();
  NodePtr ParseCompare();
  NodePtr ParseSum();
  NodePtr ParseConcat();
  NodePtr ParseProduct();
  NodePtr ParsePower();
  NodePtr ParseUnary(bool with_filters = true);
  NodePtr ParsePrimary();
  NodePtr ParsePostfix(NodePtr node);
  NodePtr ParseSubscript(NodePtr object);
  NodePtr ParseTest(NodePtr input);
  NodePtr ParseParenthesis();
  // Items up to `close`, and that.
  NodePtr ParseItems(NodePtr list, std::string_view close);
  NodePtr ParseDictLiteral();
  NodePtr ParseNumber();
  NodePtr Literal(Value value) const;
  NodePtr Binary(Node::Kind kind, std::string op, NodePtr left, NodePtr right) const;
  void ParseArguments(Node* call);

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
  int conditions_ = 0;
};

}  // namespace treadle::jinja
