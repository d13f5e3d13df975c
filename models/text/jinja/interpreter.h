// Walks a template's tree. One instance renders once, on one thread.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "models/text/jinja/ast.h"
#include "models/text/jinja/value.h"

namespace treadle::jinja {

class Interpreter {
 public:
  // `context` made the values of `variables`; both outlive the interpreter.
  Interpreter(Context& context, const Named& variables);

  // Throws TemplateError.
  std::string Render(const std::vector<NodePtr>& statements);

 private:
  using Scope = std::map<std::string, Value, std::less<>>;
  enum class Flow { kNext, kBreak, kContinue };

  // Statements (interpreter.cc)
  Flow RunBody(const std::vector<NodePtr>& body);
  Flow Run(const Node& node);
  Flow RunFor(const Node& node);
  Flow RunIf(const Node& node);
  void Set(const Node& node, Value value);
  // The text that the body writes, through the node's filter if it has one.
  Value CaptureFiltered(const Node& node);
  void RunMacro(const Node& node);
  void Write(std::string_view text);
  void Assign(const std::vector<std::string>& targets, const Value& value);
  void AssignAttribute(const std::string& name, const std::string& attribute, Value value);
  Scope MacroScope(const Node& macro, const Arguments& arguments);
  Value CallMacro(const Node& macro, const Arguments& arguments);
  List LoopItems(const Node& node);
  Value LoopVariable(const List& items, size_t index);
  std::string Capture(const std::vector<NodePtr>& body);

  // Expressions (evaluate.cc)
  Value Evaluate(const Node& node);
  Value EvaluateKind(const Node& node);
  Value EvaluateName(const Node& node);
  Value EvaluateCall(const Node& node);
  Value EvaluateFilter(const Node& node);
  Value EvaluateSlice(const Node& node);
  Value EvaluateCompare(const Node& node);
  Value EvaluateArithmetic(const Node& node);
  Value EvaluateConcat(const Node& node);
  Value EvaluateSign(const Node& node);
  Value EvaluateList(const Node& node);
  Value EvaluateDict(const Node& node);
  Value Add(const Value& left, const Value& right);
  Value Multiply(const Value& left, const Value& right);
  Value IntegerArithmetic(std::string_view op, int64_t left, int64_t right);
  Value FloatArithmetic(std::string_view op, double left, double right);
  // The arguments of a call, filter or test, after `first` if there is one.
  Arguments EvaluateArguments(const Node& node, const Value* first);

  Context& context_;
  // scopes_[0] is the template's own; macros see it and their own, not their caller's.
  std::vector<Scope> scopes_;
  std::string* out_ = nullptr;
};

}  // namespace treadle::jinja
