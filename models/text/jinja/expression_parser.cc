#include "models/text/jinja/expression_parser.h"

#include <algorithm>

#include "base/number.h"
#include "models/text/jinja/library.h"

namespace treadle::jinja {
namespace {

using Kind = Node::Kind;
constexpr int kMaxTreeDepth = 200;

// Counts how deep the parser is in itself.
class Nesting {
 public:
  Nesting(int* depth, const ExpressionParser& parser) : depth_(depth) {
    if (++*depth_ > kMaxTreeDepth) parser.Fail("expressions nest more than ", kMaxTreeDepth);
  }
  ~Nesting() { --*depth_; }

 private:
  int* depth_;
};

}  // namespace

bool ExpressionParser::Accept(std::string_view op) {
  if (!Here().Is(op)) return false;
  ++at_;
  return true;
}

bool ExpressionParser::NamesBefore(std::string_view name, std::string_view tag) const {
  for (size_t i = at_; i < tokens_.size() && !tokens_[i].IsName(tag); ++i) {
    if (tokens_[i].IsName(name)) return true;
  }
  return false;
}

bool ExpressionParser::AcceptName(std::string_view name) {
  if (!Here().IsName(name)) return false;
  ++at_;
  return true;
}

void ExpressionParser::Expect(std::string_view op) {
  if (!Accept(op)) Fail("expected '", op, "', found ", Found());
}

std::string ExpressionParser::ExpectName(const char* what) {
  if (Here().kind != Token::Kind::kName) Fail("expected ", what, ", found ", Found());
  return Next().text;
}

std::string ExpressionParser::Found() const {
  switch (Here().kind) {
    case Token::Kind::kText:
    case Token::Kind::kEnd:
      return "the end";
    case Token::Kind::kCloseOutput:
      return "'}}'";
    case Token::Kind::kCloseTag:
      return "'%}'";
    default:
      return Str("'", Here().text.substr(0, 40), "'");
  }
}

NodePtr ExpressionParser::Make(Kind kind, std::string text) const {
  auto node = std::make_unique<Node>();
  node->kind = kind;
  node->line = Here().line;
  node->text = std::move(text);
  return node;
}

NodePtr ExpressionParser::Seal(NodePtr node) const {
  for (const NodePtr& kid : node->kids) {
    if (kid) node->depth = std::max(node->depth, kid->depth + 1);
  }
  for (const auto& body : node->bodies) {
    for (const NodePtr& kid : body) node->depth = std::max(node->depth, kid->depth + 1);
  }
  if (node->depth > kMaxTreeDepth) {
    throw TemplateError{node->line, Str("the template nests more than ", kMaxTreeDepth, " levels")};
  }
  return node;
}

NodePtr ExpressionParser::Literal(Value value) const {
  NodePtr node = Make(Kind::kLiteral);
  node->value = std::move(value);
  return node;
}

NodePtr ExpressionParser::Binary(Kind kind, std::string op, NodePtr left, NodePtr right) const {
  NodePtr node = Make(kind, std::move(op));
  node->line = left->line;
  node->kids.push_back(std::move(left));
  node->kids.push_back(std::move(right));
  return Seal(std::move(node));
}

NodePtr ExpressionParser::ParseExpression() {
  const Nesting nesting(&nesting_, *this);
  NodePtr value = ParseOr();
  while (AcceptName("if")) {
    NodePtr condition = ParseOr();
    NodePtr other = AcceptName("else") ? ParseExpression() : nullptr;
    value = Binary(Kind::kConditional, "", std::move(value), std::move(condition));
    value->kids.push_back(std::move(other));
    value = Seal(std::move(value));
  }
  return value;
}

NodePtr ExpressionParser::ParseExpressionOrList() {
  NodePtr first = ParseExpression();
  if (!Here().Is(",")) return first;
  NodePtr list = Make(Kind::kList, "tuple");
  list->kids.push_back(std::move(first));
  while (Accept(",")) {
    if (Here().kind == Token::Kind::kCloseTag || Here().kind == Token::Kind::kCloseOutput) break;
    list->kids.push_back(ParseExpression());
  }
  return Seal(std::move(list));
}

NodePtr ExpressionParser::ParseOr() {
  NodePtr left = ParseAnd();
  while (AcceptName("or")) left = Binary(Kind::kOr, "", std::move(left), ParseAnd());
  return left;
}

NodePtr ExpressionParser::ParseAnd() {
  NodePtr left = ParseNot();
  while (AcceptName("and")) left = Binary(Kind::kAnd, "", std::move(left), ParseNot());
  return left;
}

NodePtr ExpressionParser::ParseNot() {
  if (!Here().IsName("not")) return ParseCompare();
  const Nesting nesting(&nesting_, *this);
  NodePtr node = Make(Kind::kNot);
  Next();
  node->kids.push_back(ParseNot());
  return Seal(std::move(node));
}

NodePtr ExpressionParser::ParseCompare() {
  NodePtr first = ParseSum();
  NodePtr node;
  for (;;) {
    static constexpr std::string_view kOps[] = {"==", "!=", "<=", ">=", "<", ">"};
    const bool not_in = Here().IsName("not") && tokens_[at_ + 1].IsName("in");
    const bool symbol = Here().kind == Token::Kind::kOperator &&
                        std::ranges::find(kOps, Here().text) != std::end(kOps);
    if (!not_in && !symbol && !Here().IsName("in")) break;
    if (!node) {
      node = Make(Kind::kCompare);
      node->kids.push_back(std::move(first));
    }
    node->names.push_back(not_in ? "not in" : Here().text);
    at_ += not_in ? 2 : 1;
    node->kids.push_back(ParseSum());
  }
  return node ? Seal(std::move(node)) : std::move(first);
}

NodePtr ExpressionParser::ParseSum() {
  NodePtr left = ParseConcat();
  while (Here().Is("+") || Here().Is("-")) {
    const std::string op = Next().text;
    left = Binary(Kind::kArithmetic, op, std::move(left), ParseConcat());
  }
  return left;
}

NodePtr ExpressionParser::ParseConcat() {
  NodePtr first = ParseProduct();
  if (!Here().Is("~")) return first;
  NodePtr node = Make(Kind::kConcat);
  node->kids.push_back(std::move(first));
  while (Accept("~")) node->kids.push_back(ParseProduct());
  return Seal(std::move(node));
}

NodePtr ExpressionParser::ParseProduct() {
  NodePtr left = ParsePower();
  while (Here().Is("*") || Here().Is("/") || Here().Is("//") || Here().Is("%")) {
    const std::string op = Next().text;
    left = Binary(Kind::kArithmetic, op, std::move(left), ParsePower());
  }
  return left;
}

NodePtr ExpressionParser::ParsePower() {
  NodePtr left = ParseUnary();
  while (Accept("**")) left = Binary(Kind::kArithmetic, "**", std::move(left), ParseUnary());
  return left;
}

NodePtr ExpressionParser::ParseUnary(bool with_filters) {
  NodePtr node;
  if (Here().Is("-") || Here().Is("+")) {
    const Nesting nesting(&nesting_, *this);
    node = Make(Kind::kSign, Here().text);
    Next();
    node->kids.push_back(ParseUnary(/*with_filters=*/false));
    node = Seal(std::move(node));
  } else {
    node = ParsePrimary();
  }
  node = ParsePostfix(std::move(node));
  if (!with_filters) return node;
  for (;;) {
    if (Here().Is("|")) {
      node = ParseFilters(std::move(node));
    } else if (Here().IsName("is")) {
      node = ParseTest(std::move(node));
    } else {
      return node;
    }
  }
}

NodePtr ExpressionParser::ParsePrimary() {
  const Token& token = Here();
  if (token.kind == Token::Kind::kString) {
    std::string text;
    while (Here().kind == Token::Kind::kString) text += Next().text;
    return Literal(Value::String(std::move(text)));
  }
  if (token.kind == Token::Kind::kInteger || token.kind == Token::Kind::kFloat)
    return ParseNumber();
  if (token.Is("(")) return ParseParenthesis();
  if (token.Is("[")) {
    NodePtr list = Make(Kind::kList);
    Next();
    return ParseItems(std::move(list), "]");
  }
  if (token.Is("{")) return ParseDictLiteral();
  if (token.kind != Token::Kind::kName) Fail("expected an expression, found ", Found());
  NodePtr node = Make(Kind::kName, token.text);
  Next();
  const std::string_view name = node->text;
  if (name == "true" || name == "True") return Literal(true);
  if (name == "false" || name == "False") return Literal(false);
  if (name == "none" || name == "None") return Literal(None{});
  return node;
}

NodePtr ExpressionParser::ParseNumber() {
  const Token token = Next();
  if (token.kind == Token::Kind::kInteger) {
    if (const auto value = NumberIn<int64_t>(token.text)) return Literal(*value);
  } else if (const auto value = NumberIn<double>(token.text)) {
    return Literal(*value);
  }
  Fail("the number ", token.text, " is out of range");
}

NodePtr ExpressionParser::ParseParenthesis() {
  Expect("(");
  if (Accept(")")) return Make(Kind::kList, "tuple");
  NodePtr first = ParseExpression();
  if (Accept(")")) return first;
  NodePtr list = Make(Kind::kList, "tuple");
  list->kids.push_back(std::move(first));
  if (!Accept(",")) Expect(")");  // which is not there
  return ParseItems(std::move(list), ")");
}

NodePtr ExpressionParser::ParseItems(NodePtr list, std::string_view close) {
  while (!Here().Is(close)) {
    list->kids.push_back(ParseExpression());
    if (!Accept(",")) break;
  }
  Expect(close);
  return Seal(std::move(list));
}

NodePtr ExpressionParser::ParseDictLiteral() {
  NodePtr dict = Make(Kind::kDict);
  Expect("{");
  while (!Here().Is("}")) {
    dict->kids.push_back(ParseExpression());
    Expect(":");
    dict->kids.push_back(ParseExpression());
    if (!Accept(",")) break;
  }
  Expect("}");
  return Seal(std::move(dict));
}

NodePtr ExpressionParser::ParsePostfix(NodePtr node) {
  for (;;) {
    if (Accept(".")) {
      if (Here().kind == Token::Kind::kInteger) {
        NodePtr index = ParseNumber();
        node = Binary(Kind::kSubscript, "", std::move(node), std::move(index));
        continue;
      }
      NodePtr attribute = Make(Kind::kAttribute);
      attribute->text = ExpectName("an attribute");
      attribute->kids.push_back(std::move(node));
      node = Seal(std::move(attribute));
    } else if (Accept("[")) {
      node = ParseSubscript(std::move(node));
    } else if (Here().Is("(")) {
      NodePtr call = Make(Kind::kCall);
      call->kids.push_back(std::move(node));
      ParseArguments(call.get());
      node = Seal(std::move(call));
    } else {
      return node;
    }
  }
}

// After "[": one key, or a slice with up to three parts.
NodePtr ExpressionParser::ParseSubscript(NodePtr object) {
  NodePtr key;
  if (!Here().Is(":")) key = ParseExpression();
  if (key && Accept("]")) {
    return Binary(Kind::kSubscript, "", std::move(object), std::move(key));
  }
  NodePtr slice = Make(Kind::kSlice);
  slice->kids.push_back(std::move(object));
  slice->kids.push_back(std::move(key));
  while (Accept(":")) {
    const bool empty = Here().Is(":") || Here().Is("]");
    slice->kids.push_back(empty ? nullptr : ParseExpression());
  }
  Expect("]");
  if (slice->kids.size() > 4) Fail("a slice has at most three parts");
  slice->kids.resize(4);
  return Seal(std::move(slice));
}

void ExpressionParser::ParseArguments(Node* call) {
  Expect("(");
  while (!Here().Is(")")) {
    const bool named = Here().kind == Token::Kind::kName && tokens_[at_ + 1].Is("=");
    std::string name;
    if (named) {
      name = Next().text;
      Expect("=");
    } else if (!call->names.empty() && !call->names.back().empty()) {
      Fail("a positional argument after a named one");
    }
    call->names.push_back(std::move(name));
    call->kids.push_back(ParseExpression());
    if (!Accept(",")) break;
  }
  Expect(")");
}

NodePtr ExpressionParser::ParseFilters(NodePtr input, bool piped) {
  while (!piped || Accept("|")) {
    piped = true;
    NodePtr filter = Make(Kind::kFilter);
    filter->text = ExpectName("a filter");
    if (conditions_ == 0 && FindFilter(filter->text) == nullptr) {
      throw TemplateError{filter->line, "there is no filter '" + filter->text + "'"};
    }
    filter->kids.push_back(std::move(input));
    if (Here().Is("(")) ParseArguments(filter.get());
    input = Seal(std::move(filter));
  }
  return input;
}

// After "is": a test may take one argument without parentheses.
NodePtr ExpressionParser::ParseTest(NodePtr input) {
  NodePtr test = Make(Kind::kTest);
  Next();
  const bool negated = AcceptName("not");
  test->text = ExpectName("a test");
  if (conditions_ == 0 && FindTest(test->text) == nullptr) {
    throw TemplateError{test->line, "there is no test '" + test->text + "'"};
  }
  test->kids.push_back(std::move(input));
  static constexpr std::string_view kNoArgument[] = {"else", "or", "and", "is", "if", "not", "in"};
  const Token::Kind kind = Here().kind;
  const bool argument = kind == Token::Kind::kString || kind == Token::Kind::kInteger ||
                        kind == Token::Kind::kFloat || Here().Is("[") || Here().Is("{") ||
                        (kind == Token::Kind::kName &&
                         std::ranges::find(kNoArgument, Here().text) == std::end(kNoArgument));
  if (Here().Is("(")) {
    ParseArguments(test.get());
  } else if (argument) {
    test->names.emplace_back();
    test->kids.push_back(ParsePostfix(ParsePrimary()));
  }
  test = Seal(std::move(test));
  if (!negated) return test;
  NodePtr node = Make(Kind::kNot);
  node->kids.push_back(std::move(test));
  return Seal(std::move(node));
}

}  // namespace treadle::jinja
