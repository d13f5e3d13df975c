// The library of a template: filters ({{ x | trim }}), tests ({% if x is defined %}), methods
// ({{ message.content.strip() }}) and functions; access to members; and how values are written.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/text/jinja/value.h"

namespace treadle::jinja {

// The input is the first positional argument.
using Filter = Value (*)(Context&, const Arguments&);
using Test = bool (*)(Context&, const Arguments&);

// nullptr if there is none of that name.
Filter FindFilter(std::string_view name);
Test FindTest(std::string_view name);

// x.attribute and x[key] as templates mean them: undefined where there is no such member. Fails for
// members of an undefined value.
Value GetAttribute(Context& context, const Value& object, std::string_view name);
Value GetItem(Context& context, const Value& object, const Value& key);

// The functions that every template sees: range, namespace, dict, cycler, joiner,
// raise_exception and strftime_now. The latter tells `now`, "YYYY-MM-DD" or "YYYY-MM-DD HH:MM:SS",
// or else, if that is empty, the clock's local time.
Named GlobalFunctions(const std::string& now);

// str(value): what {{ value }} writes. An undefined value writes nothing.
std::string Text(Context& context, const Value& value);

struct JsonStyle {
  int indent = -1;  // spaces per level; -1: on one line
  bool ascii_only = false;
  bool sort_keys = false;
  // Texts between items, and between a key and its value; unset: ", ", and "," before a new line.
  std::optional<std::string> between_items;
  std::string behind_key = ": ";
};
// json.dumps(value). Fails for what JSON has no form for.
std::string ToJson(Context& context, const Value& value, const JsonStyle& style);
// json.loads(text): members stay in their order; a whole number beyond 64 bits is a BigInteger.
// Fails for what is no JSON.
Value FromJson(Context& context, std::string_view text);

bool IsMethod(const Value& object, std::string_view name);
// A method of a string or dictionary. Fails, naming type and method, where there is none.
Value CallMethod(Context& context, const Value& object, std::string_view method,
                 const Arguments& arguments);

// Reads a call's arguments by position or by name; fails for too many or for an unknown name.
class ArgumentReader {
 public:
  // `names` of all parameters, in order; `skip` positional arguments belong to the caller.
  ArgumentReader(Context& context, std::string_view function, const Arguments& arguments,
                 std::vector<std::string_view> names, size_t skip = 0);
  bool Has(std::string_view name) const { return Get(name) != nullptr; }
  const Value* Get(std::string_view name) const;  // nullptr if it was not given
  Value Required(std::string_view name) const;
  std::string String(std::string_view name) const;         // required
  const Value* StringOrNone(std::string_view name) const;  // nullptr for none, too
  int64_t Int(std::string_view name, int64_t otherwise) const;
  bool Bool(std::string_view name, bool otherwise) const;

 private:
  Context& context_;
  std::string_view function_;
  const Arguments& arguments_;
  std::vector<std::string_view> names_;
  size_t skip_;
};

// UpperCase or one of its kin (unicode.h), which costs more than reading.
Value Cased(Context& context, std::string (*convert)(std::string_view), std::string_view text);

enum class Side { kLeft, kRight, kBoth };
// Without `characters`, white space as Python sees it.
std::string_view Strip(std::string_view text, Side side, const Value* characters);
// At line ends as Python sees them.
std::vector<std::string_view> SplitLines(Context& context, std::string_view text);
std::string Replace(Context& context, std::string_view text, std::string_view from,
                    std::string_view to, int64_t count);

}  // namespace treadle::jinja
