// The tests of {% if x is ... %}, and access to members.
#include <unordered_map>

#include "models/text/jinja/library.h"
#include "models/text/unicode.h"

namespace treadle::jinja {
namespace {

using A = const Arguments;
using C = Context;

const Value& Input(A& arguments) { return arguments.positional[0]; }

const Value& Other(C& context, A& arguments) {
  if (arguments.positional.size() != 2) context.Fail("the test needs one argument");
  return arguments.positional[1];
}

int64_t Remainder(C& context, const Value& input, const Value& divisor) {
  if (!input.is_integral() || !divisor.is_integral() || divisor.AsInt() == 0) {
    context.Fail("the test needs integers");
  }
  return divisor.AsInt() == -1 ? 0 : input.AsInt() % divisor.AsInt();
}

// A method that is not called where it is named.
Value Method(const Value& object, std::string_view name) {
  const auto call = [object, name = std::string(name)](C& context, A& arguments) {
    return CallMethod(context, object, name, arguments);
  };
  return Value::Callable(call, {}, object.depth() + 1);
}

bool IsSequence(const Value& value) {
  return value.is_list() ? !value.TypeName().starts_with("dict_")
                         : value.is_string() || value.is_dict() || value.is_undefined();
}

bool IsIterable(const Value& value) {
  return value.is_string() || value.is_list() || value.is_dict() || value.is_undefined();
}

}  // namespace

Test FindTest(std::string_view name) {
  static const std::unordered_map<std::string_view, Test> tests = {
      {"defined", [](C&, A& a) { return !Input(a).is_undefined(); }},
      {"undefined", [](C&, A& a) { return Input(a).is_undefined(); }},
      {"none", [](C&, A& a) { return Input(a).is_none(); }},
      {"string", [](C&, A& a) { return Input(a).is_string(); }},
      {"mapping", [](C&, A& a) { return Input(a).is_dict(); }},
      {"iterable", [](C&, A& a) { return IsIterable(Input(a)); }},
      {"sequence", [](C&, A& a) { return IsSequence(Input(a)); }},
      {"number", [](C&, A& a) { return Input(a).is_number() || Input(a).is_big(); }},
      {"integer", [](C&, A& a) { return Input(a).is_int() || Input(a).is_big(); }},
      {"float", [](C&, A& a) { return Input(a).is_float(); }},
      {"boolean", [](C&, A& a) { return Input(a).is_bool(); }},
      {"callable", [](C&, A& a) { return Input(a).is_callable() || Input(a).is_undefined(); }},
      {"true", [](C&, A& a) { return Input(a).is_bool() && Input(a).AsBool(); }},
      {"false", [](C&, A& a) { return Input(a).is_bool() && !Input(a).AsBool(); }},
      {"odd", [](C& c, A& a) { return Remainder(c, Input(a), int64_t{2}) != 0; }},
      {"even", [](C& c, A& a) { return Remainder(c, Input(a), int64_t{2}) == 0; }},
      {"divisibleby", [](C& c, A& a) { return Remainder(c, Input(a), Other(c, a)) == 0; }},
      {"equalto", [](C& c, A& a) { return c.Equal(Input(a), Other(c, a)); }},
      {"eq", [](C& c, A& a) { return c.Equal(Input(a), Other(c, a)); }},
      {"==", [](C& c, A& a) { return c.Equal(Input(a), Other(c, a)); }},
      {"ne", [](C& c, A& a) { return !c.Equal(Input(a), Other(c, a)); }},
      {"!=", [](C& c, A& a) { return !c.Equal(Input(a), Other(c, a)); }},
      {"in", [](C& c, A& a) { return c.Contains(Other(c, a), Input(a)); }},
      {"lt", [](C& c, A& a) { return c.Order(Input(a), Other(c, a)) < 0; }},
      {"le", [](C& c, A& a) { return c.Order(Input(a), Other(c, a)) <= 0; }},
      {"gt", [](C& c, A& a) { return c.Order(Input(a), Other(c, a)) > 0; }},
      {"ge", [](C& c, A& a) { return c.Order(Input(a), Other(c, a)) >= 0; }},
  };
  const auto found = tests.find(name);
  return found == tests.end() ? nullptr : found->second;
}

Value GetAttribute(Context& context, const Value& object, std::string_view name) {
  if (IsMethod(object, name)) return Method(object, name);
  return GetItem(context, object, Value::String(std::string(name)));
}

Value GetItem(Context& context, const Value& object, const Value& key) {
  context.Step();
  if (object.is_undefined()) context.Fail("'", object.UndefinedName(), "' is undefined");
  constexpr size_t kMaxName = 100;
  const Undefined missing{key.is_string() ? Cut(key.AsString(), kMaxName) : "an item"};
  context.Read(key);
  if (object.is_dict()) {
    if (const Value* found = context.Find(object, key)) return *found;
  }
  if (key.is_string() && IsMethod(object, key.AsString())) return Method(object, key.AsString());
  if (object.is_callable() && key.is_string()) {
    const Namespace& attributes = object.AsCallee().attributes;
    const auto found = attributes.find(key.AsString());
    return found == attributes.end() ? Value(missing) : found->second;
  }
  if (object.is_namespace() && key.is_string()) {
    const auto found = object.AsNamespace().find(key.AsString());
    return found == object.AsNamespace().end() ? Value(missing) : found->second;
  }
  const bool indexed =
      object.is_list() ? !object.TypeName().starts_with("dict_") : object.is_string();
  if (!key.is_integral() || !indexed) return missing;
  const int64_t length = context.Length(object);
  const int64_t index = key.AsInt() < 0 ? key.AsInt() + length : key.AsInt();
  if (index < 0 || index >= length) return missing;
  if (object.is_list()) return object.AsList()[static_cast<size_t>(index)];
  context.Step(length / 16);
  std::string_view rest = object.AsString();
  for (int64_t i = 0; i < index; ++i) rest.remove_prefix(ReadUtf8(rest).length);
  return context.MakeString(std::string(rest.substr(0, ReadUtf8(rest).length)));
}

}  // namespace treadle::jinja
