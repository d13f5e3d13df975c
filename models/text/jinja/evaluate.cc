// The expression half of the interpreter.
#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "base/utf8.h"
#include "models/text/jinja/interpreter.h"
#include "models/text/jinja/library.h"

namespace treadle::jinja {
namespace {
using Kind = Node::Kind;
}  // namespace

Value Interpreter::Evaluate(const Node& node) {
  context_.line = node.line;
  context_.Enter();
  Value value = EvaluateKind(node);
  context_.line = node.line;
  context_.Leave();
  return value;
}

Value Interpreter::EvaluateKind(const Node& node) {
  switch (node.kind) {
    case Kind::kLiteral:
      return node.value;
    case Kind::kName:
      return EvaluateName(node);
    case Kind::kAttribute:
      return GetAttribute(context_, Evaluate(*node.kids[0]), node.text);
    case Kind::kSubscript: {
      const Value object = Evaluate(*node.kids[0]);
      return GetItem(context_, object, Evaluate(*node.kids[1]));
    }
    case Kind::kSlice:
      return EvaluateSlice(node);
    case Kind::kCall:
      return EvaluateCall(node);
    case Kind::kFilter:
      return EvaluateFilter(node);
    case Kind::kTest: {
      const Value input = Evaluate(*node.kids[0]);
      const Test test = FindTest(node.text);
      if (test == nullptr) context_.Fail("there is no test '", node.text, "'");
      return test(context_, EvaluateArguments(node, &input));
    }
    case Kind::kNot:
      return !Evaluate(*node.kids[0]).Truth();
    case Kind::kSign:
      return EvaluateSign(node);
    case Kind::kAnd: {
      Value left = Evaluate(*node.kids[0]);
      return left.Truth() ? Evaluate(*node.kids[1]) : left;
    }
    case Kind::kOr: {
      Value left = Evaluate(*node.kids[0]);
      return left.Truth() ? left : Evaluate(*node.kids[1]);
    }
    case Kind::kArithmetic:
      return EvaluateArithmetic(node);
    case Kind::kCompare:
      return EvaluateCompare(node);
    case Kind::kConcat:
      return EvaluateConcat(node);
    case Kind::kConditional:
      if (Evaluate(*node.kids[1]).Truth()) return Evaluate(*node.kids[0]);
      return node.kids[2] ? Evaluate(*node.kids[2]) : Value(Undefined{"the 'if' without 'else'"});
    case Kind::kList:
      return EvaluateList(node);
    case Kind::kDict:
      return EvaluateDict(node);
    default:
      TREADLE_CHECK(false);  // the parser makes no expressions of other kinds
      return {};
  }
}

Value Interpreter::EvaluateName(const Node& node) {
  context_.Step(static_cast<int64_t>(scopes_.size() / 4));
  for (size_t i = scopes_.size(); i-- > 0;) {
    const auto found = scopes_[i].find(node.text);
    if (found != scopes_[i].end()) return found->second;
  }
  return Undefined{Cut(node.text, 100)};
}

Arguments Interpreter::EvaluateArguments(const Node& node, const Value* first) {
  Arguments arguments;
  if (first != nullptr) {
    context_.Read(*first);
    arguments.positional.push_back(*first);
  }
  for (size_t i = 0; i < node.names.size(); ++i) {
    Value value = Evaluate(*node.kids[i + 1]);
    context_.Read(value);
    if (node.names[i].empty()) {
      arguments.positional.push_back(std::move(value));
    } else {
      arguments.named.emplace_back(node.names[i], std::move(value));
    }
  }
  return arguments;
}

Value Interpreter::EvaluateCall(const Node& node) {
  const Node& callee = *node.kids[0];
  if (callee.kind == Kind::kAttribute) {
    const Value object = Evaluate(*callee.kids[0]);
    const Arguments arguments = EvaluateArguments(node, nullptr);
    if (!object.is_namespace()) return CallMethod(context_, object, callee.text, arguments);
    const Value member = GetAttribute(context_, object, callee.text);
    if (member.is_callable()) return member.AsCallable()(context_, arguments);
    context_.Fail("'", callee.text, "' cannot be called");
  }
  const Value function = Evaluate(callee);
  const Arguments arguments = EvaluateArguments(node, nullptr);
  if (function.is_undefined()) context_.Fail("'", function.UndefinedName(), "' is undefined");
  if (!function.is_callable()) context_.Fail("a '", function.TypeName(), "' cannot be called");
  return function.AsCallable()(context_, arguments);
}

Value Interpreter::EvaluateFilter(const Node& node) {
  const Filter filter = FindFilter(node.text);
  if (filter == nullptr) context_.Fail("there is no filter '", node.text, "'");
  const Value input = Evaluate(*node.kids[0]);
  const Arguments arguments = EvaluateArguments(node, &input);
  context_.line = node.line;
  return filter(context_, arguments);
}

// As Python slices: bounds beyond the ends are the ends.
Value Interpreter::EvaluateSlice(const Node& node) {
  const Value object = Evaluate(*node.kids[0]);
  if (object.is_undefined()) context_.Fail("'", object.UndefinedName(), "' is undefined");
  if ((!object.is_list() || object.TypeName().starts_with("dict_")) && !object.is_string()) {
    context_.Fail("a '", object.TypeName(), "' cannot be sliced");
  }
  const auto part = [&](size_t i, int64_t otherwise) {
    const Value value = node.kids[i] ? Evaluate(*node.kids[i]) : Value(None{});
    if (value.is_none()) return otherwise;
    if (!value.is_integral()) context_.Fail("slice bounds are integers or none");
    return std::clamp<int64_t>(value.AsInt(), -INT32_MAX, INT32_MAX);
  };
  const int64_t length = context_.Length(object);
  const int64_t step = part(3, 1);
  if (step == 0) context_.Fail("the slice's step is 0");
  const int64_t lowest = step > 0 ? 0 : -1;
  const int64_t highest = step > 0 ? length : length - 1;
  const auto bound = [&](size_t i, int64_t otherwise) {
    int64_t at = part(i, INT64_MAX);
    if (at == INT64_MAX) return otherwise;
    if (at < 0) at += length;
    return std::clamp(at, lowest, highest);
  };
  const int64_t start = bound(1, step > 0 ? lowest : highest);
  const int64_t stop = bound(2, step > 0 ? highest : lowest);
  const List items = context_.Items(object);
  List chosen;
  for (int64_t i = start; step > 0 ? i < stop : i > stop; i += step) {
    chosen.push_back(items[static_cast<size_t>(i)]);
  }
  if (object.is_list()) {
    const std::string& form = object.ListForm();
    return context_.MakeList(std::move(chosen), form == "tuple" ? form : "");
  }
  std::string text;
  for (const Value& character : chosen) text += character.AsString();
  return context_.MakeString(std::move(text));
}

Value Interpreter::EvaluateCompare(const Node& node) {
  Value left = Evaluate(*node.kids[0]);
  for (size_t i = 0; i < node.names.size(); ++i) {
    Value right = Evaluate(*node.kids[i + 1]);
    const std::string& op = node.names[i];
    bool holds = false;
    if (op == "==" || op == "!=") {
      holds = context_.Equal(left, right) == (op == "==");
    } else if (op == "in" || op == "not in") {
      holds = context_.Contains(right, left) == (op == "in");
    } else {
      const int order = context_.Order(left, right);
      holds = op == "<" ? order < 0 : op == "<=" ? order <= 0 : op == ">" ? order > 0 : order >= 0;
    }
    if (!holds) return false;
    left = std::move(right);
  }
  return true;
}

Value Interpreter::EvaluateArithmetic(const Node& node) {
  const Value left = Evaluate(*node.kids[0]);
  const Value right = Evaluate(*node.kids[1]);
  const std::string_view op = node.text;
  for (const Value& operand : {left, right}) {
    if (operand.is_undefined()) context_.Fail("'", operand.UndefinedName(), "' is undefined");
  }
  if (left.is_number() && right.is_number()) {
    const bool floats =
        left.is_float() || right.is_float() || op == "/" || (op == "**" && right.AsInt() < 0);
    return floats ? FloatArithmetic(op, left.AsDouble(), right.AsDouble())
                  : IntegerArithmetic(op, left.AsInt(), right.AsInt());
  }
  if (op == "+") return Add(left, right);
  if (op == "*") return Multiply(left, right);
  context_.Fail("unsupported operands for ", op, ": '", left.TypeName(), "' and '",
                right.TypeName(), "'");
}

Value Interpreter::Add(const Value& left, const Value& right) {
  if (left.is_string() && right.is_string()) {
    return context_.MakeString(left.AsString() + right.AsString());
  }
  if (!left.is_list() || !right.is_list() || left.ListForm() != right.ListForm() ||
      (left.ListForm() != "" && left.ListForm() != "tuple")) {
    context_.Fail("unsupported operands for +: '", left.TypeName(), "' and '", right.TypeName(),
                  "'");
  }
  List items = left.AsList();
  context_.Charge((items.size() + right.AsList().size()) * sizeof(Value));
  items.insert(items.end(), right.AsList().begin(), right.AsList().end());
  return context_.MakeList(std::move(items), left.ListForm());
}

// A string, list or tuple, some times over.
Value Interpreter::Multiply(const Value& left, const Value& right) {
  const Value& text = left.is_integral() ? right : left;
  const Value& count = left.is_integral() ? left : right;
  const bool list = text.TypeName() == "list" || text.TypeName() == "tuple";
  if ((!text.is_string() && !list) || !count.is_integral()) {
    context_.Fail("unsupported operands for *: '", left.TypeName(), "' and '", right.TypeName(),
                  "'");
  }
  const auto times = static_cast<size_t>(
      std::clamp<int64_t>(count.AsInt(), 0, static_cast<int64_t>(context_.budget().bytes) + 1));
  if (list) {
    const List& items = text.AsList();
    context_.Charge(items.size() * sizeof(Value) * times);
    List repeated;
    for (size_t i = 0; i < times && !items.empty(); ++i) {
      repeated.insert(repeated.end(), items.begin(), items.end());
    }
    return context_.MakeList(std::move(repeated), text.ListForm());
  }
  const std::string& once = text.AsString();
  // Cannot wrap: a string is at most as long as the budget, and so are the times.
  context_.Charge(once.size() * times);
  std::string repeated;
  for (size_t i = 0; i < times && !once.empty(); ++i) repeated += once;
  return Value::String(std::move(repeated));
}

Value Interpreter::IntegerArithmetic(std::string_view op, int64_t left, int64_t right) {
  int64_t result = 0;
  bool overflow = false;
  if (op == "+") {
    overflow = __builtin_add_overflow(left, right, &result);
  } else if (op == "-") {
    overflow = __builtin_sub_overflow(left, right, &result);
  } else if (op == "*") {
    overflow = __builtin_mul_overflow(left, right, &result);
  } else if (op == "**") {
    result = 1;
    for (int64_t i = 0; i < right && !overflow && left != 1; ++i) {
      context_.Step();
      overflow = __builtin_mul_overflow(result, left, &result);
    }
  } else {
    if (right == 0) context_.Fail("division by zero");
    if (right == -1) {
      overflow = op == "//" && __builtin_sub_overflow(int64_t{0}, left, &result);
    } else {  // rounded down, as Python does
      const bool adjust = left % right != 0 && (left % right < 0) != (right < 0);
      result = op == "//" ? left / right - adjust : left % right + (adjust ? right : 0);
    }
  }
  if (overflow) context_.Fail(left, " ", op, " ", right, " is out of range");
  return result;
}

Value Interpreter::FloatArithmetic(std::string_view op, double left, double right) {
  if (op == "+") return left + right;
  if (op == "-") return left - right;
  if (op == "*") return left * right;
  if (op == "**") return std::pow(left, right);
  if (right == 0) context_.Fail("division by zero");
  if (op == "/") return left / right;
  if (op == "//") return std::floor(left / right);
  return left - std::floor(left / right) * right;
}

Value Interpreter::EvaluateConcat(const Node& node) {
  std::string text;
  for (const NodePtr& kid : node.kids) {
    const std::string part = Text(context_, Evaluate(*kid));
    context_.Charge(part.size());
    text += part;
  }
  return Value::String(std::move(text));
}

Value Interpreter::EvaluateSign(const Node& node) {
  const Value operand = Evaluate(*node.kids[0]);
  if (!operand.is_number()) {
    context_.Fail("unsupported operand for ", node.text, ": '", operand.TypeName(), "'");
  }
  if (node.text == "+") return operand;
  if (operand.is_float()) return -operand.AsDouble();
  return IntegerArithmetic("-", 0, operand.AsInt());
}

Value Interpreter::EvaluateList(const Node& node) {
  List items;
  for (const NodePtr& kid : node.kids) items.push_back(Evaluate(*kid));
  return context_.MakeList(std::move(items), node.text);
}

Value Interpreter::EvaluateDict(const Node& node) {
  Dict items;
  std::unordered_map<std::string, size_t> places;
  for (size_t i = 0; i < node.kids.size(); i += 2) {
    Value key = Evaluate(*node.kids[i]);
    if (!key.is_key()) {
      context_.Fail("a key is of type '", key.TypeName(), "', expected a text, number or none");
    }
    Value value = Evaluate(*node.kids[i + 1]);
    std::string text = key.KeyText();
    context_.Charge(2 * text.size());
    const auto [place, added] = places.emplace(std::move(text), items.size());
    if (added) {
      items.emplace_back(std::move(key), std::move(value));
    } else {
      items[place->second].second = std::move(value);
    }
  }
  return context_.MakeDict(std::move(items));
}

}  // namespace treadle::jinja
