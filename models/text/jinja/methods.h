// Methods of strings and dictionaries, as in {{ message.content.strip() }}.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "models/text/jinja/value.h"

namespace treadle::jinja {

// Fails, naming type and method, where there is none.
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
  std::string String(std::string_view name) const;  // required
  int64_t Int(std::string_view name, int64_t otherwise) const;
  bool Bool(std::string_view name, bool otherwise) const;

 private:
  Context& context_;
  std::string_view function_;
  const Arguments& arguments_;
  std::vector<std::string_view> names_;
  size_t skip_;
};

enum class Side { kLeft, kRight, kBoth };
// Without `characters`, white space as Python sees it.
std::string_view Strip(std::string_view text, Side side, const Value* characters);
// At line ends as Python sees them.
std::vector<std::string_view> SplitLines(Context& context, std::string_view text);
std::string Replace(Context& context, std::string_view text, std::string_view from,
                    std::string_view to, int64_t count);
// Upper and lower case of ASCII letters; others stay.
std::string Upper(std::string_view text);
std::string Lower(std::string_view text);
std::string Capitalize(std::string_view text);
std::string Title(std::string_view text);

}  // namespace treadle::jinja
