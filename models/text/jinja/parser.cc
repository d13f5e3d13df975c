#include <functional>
#include <initializer_list>
#include <unordered_map>
#include <utility>

#include "models/text/jinja/expression_parser.h"

namespace treadle::jinja {
namespace {

using Kind = Node::Kind;
using Body = std::vector<NodePtr>;
constexpr int kMaxBlocks = 100;  // open at once

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : e_(std::move(tokens)) {}

  Body ParseAll() { return ParseBody({}); }

 private:
  // Statements up to a tag named in `ends` (whose name is consumed, not its close), or to the end
  // of the template if there are none.
  Body ParseBody(std::initializer_list<std::string_view> ends) {
    if (++blocks_ > kMaxBlocks) e_.Fail("more than ", kMaxBlocks, " blocks are open");
    Body body;
    const int opened = e_.LastLine();
    for (;;) {
      const Token token = e_.Next();
      if (token.kind == Token::Kind::kText) {
        body.push_back(e_.Make(Kind::kText, token.text));
      } else if (token.kind == Token::Kind::kOpenOutput) {
        body.push_back(ParseOutput());
      } else if (token.kind == Token::Kind::kOpenTag) {
        const std::string name = e_.ExpectName("a tag");
        for (std::string_view end : ends) {
          if (name == end) {
            ended_by_ = name;
            --blocks_;
            return body;
          }
        }
        body.push_back(ParseStatement(name));
      } else {  // kEnd: nothing else stands outside a tag
        if (ends.size() > 0) {
          throw TemplateError{opened, Str("'", *(ends.end() - 1), "' is missing")};
        }
        --blocks_;
        return body;
      }
    }
  }

  NodePtr ParseOutput() {
    NodePtr node = e_.Make(Kind::kOutput);
    node->kids.push_back(e_.ParseExpressionOrList());
    if (e_.Here().kind != Token::Kind::kCloseOutput) e_.Fail("expected '}}', found ", e_.Found());
    e_.Next();
    return e_.Seal(std::move(node));
  }

  void CloseTag() {
    if (e_.Here().kind != Token::Kind::kCloseTag) e_.Fail("expected '%}', found ", e_.Found());
    e_.Next();
  }

  NodePtr ParseStatement(const std::string& name) {
    static const std::unordered_map<std::string_view, NodePtr (Parser::*)()> kTags = {
        {"for", &Parser::ParseFor},
        {"if", &Parser::ParseIf},
        {"set", &Parser::ParseSet},
        {"macro", &Parser::ParseMacro},
        {"generation", &Parser::ParseGeneration},
        {"filter", &Parser::ParseFilterBlock},
        {"break", &Parser::ParseBreak},
        {"continue", &Parser::ParseContinue},
    };
    const auto tag = kTags.find(name);
    if (tag == kTags.end()) e_.Fail("there is no tag '", name, "' here");
    return (this->*tag->second)();
  }

  std::vector<std::string> ParseTargets() {
    std::vector<std::string> targets;
    const bool parenthesis = e_.Accept("(");
    do {
      targets.push_back(e_.ExpectName("a variable"));
    } while (e_.Accept(","));
    if (parenthesis) e_.Expect(")");
    return targets;
  }

  NodePtr ParseFor() {
    NodePtr node = e_.Make(Kind::kFor);
    node->names = ParseTargets();
    if (!e_.AcceptName("in")) e_.Fail("expected 'in', found ", e_.Found());
    node->kids.push_back(e_.ParseOr());
    node->kids.push_back(e_.AcceptName("if") ? e_.ParseExpression() : nullptr);
    CloseTag();
    ++loops_;
    node->bodies.push_back(ParseBody({"else", "endfor"}));
    --loops_;
    node->bodies.emplace_back();
    if (ended_by_ == "else") {
      CloseTag();
      node->bodies[1] = ParseBody({"endfor"});
    }
    CloseTag();
    return e_.Seal(std::move(node));
  }

  NodePtr ParseIf() {
    NodePtr node = e_.Make(Kind::kIf);
    do {
      node->kids.push_back(e_.ParseExpressionOrList());
      CloseTag();
      e_.EnterCondition();
      node->bodies.push_back(ParseBody({"elif", "else", "endif"}));
      e_.LeaveCondition();
    } while (ended_by_ == "elif");
    node->bodies.emplace_back();
    if (ended_by_ == "else") {
      CloseTag();
      node->bodies.back() = ParseBody({"endif"});
    }
    CloseTag();
    return e_.Seal(std::move(node));
  }

  NodePtr ParseSet() {
    NodePtr node = e_.Make(Kind::kSet);
    node->names = ParseTargets();
    if (e_.Accept(".")) node->text = e_.ExpectName("an attribute");
    if (!node->text.empty() && node->names.size() > 1) e_.Fail("one attribute is set at a time");
    if (e_.Accept("=")) {
      node->kids.push_back(e_.ParseExpressionOrList());
      CloseTag();
      return e_.Seal(std::move(node));
    }
    if (node->names.size() > 1) e_.Fail("expected '=', found ", e_.Found());
    node->kind = Kind::kBlockSet;
    // The captured text takes the place of a name that no template can spell.
    node->kids.push_back(e_.Here().Is("|") ? e_.ParseFilters(e_.Make(Kind::kName, "")) : nullptr);
    CloseTag();
    node->bodies.push_back(ParseBody({"endset"}));
    CloseTag();
    return e_.Seal(std::move(node));
  }

  NodePtr ParseMacro() {
    NodePtr node = e_.Make(Kind::kMacro);
    node->text = e_.ExpectName("the macro's name");
    e_.Expect("(");
    while (!e_.Here().Is(")")) {
      node->names.push_back(e_.ExpectName("a parameter"));
      const bool has_default = e_.Accept("=");
      node->kids.push_back(has_default ? e_.ParseExpression() : nullptr);
      if (!e_.Accept(",")) break;
    }
    e_.Expect(")");
    CloseTag();
    const int loops = std::exchange(loops_, 0);
    for (const char* name : {"varargs", "kwargs"}) {
      if (e_.NamesBefore(name, "endmacro")) node->catches.emplace_back(name);
    }
    node->bodies.push_back(ParseBody({"endmacro"}));
    loops_ = loops;
    if (e_.Here().kind == Token::Kind::kName) e_.Next();  // {% endmacro name %}
    CloseTag();
    return e_.Seal(std::move(node));
  }

  // transformers marks what the model itself wrote; here it is only a group.
  NodePtr ParseGeneration() {
    NodePtr node = e_.Make(Kind::kGroup);
    CloseTag();
    node->bodies.push_back(ParseBody({"endgeneration"}));
    CloseTag();
    return e_.Seal(std::move(node));
  }

  NodePtr ParseFilterBlock() {
    NodePtr node = e_.Make(Kind::kFilterBlock);
    node->kids.push_back(e_.ParseFilters(e_.Make(Kind::kName, ""), /*piped=*/false));
    CloseTag();
    node->bodies.push_back(ParseBody({"endfilter"}));
    CloseTag();
    return e_.Seal(std::move(node));
  }

  NodePtr ParseBreak() { return ParseJump(Kind::kBreak, "break"); }
  NodePtr ParseContinue() { return ParseJump(Kind::kContinue, "continue"); }
  NodePtr ParseJump(Kind kind, const char* name) {
    if (loops_ == 0) e_.Fail("'", name, "' stands outside a loop");
    NodePtr node = e_.Make(kind);
    CloseTag();
    return node;
  }

  ExpressionParser e_;
  std::string ended_by_;  // the tag that ended the last body
  int blocks_ = 0;
  int loops_ = 0;
};

}  // namespace

std::vector<NodePtr> ParseTemplate(std::string_view source) {
  return Parser(Tokenize(source)).ParseAll();
}

}  // namespace treadle::jinja
