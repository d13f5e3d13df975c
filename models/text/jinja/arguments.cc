// ArgumentReader: the arguments of a call, by position and by name.
#include <algorithm>
#include <utility>

#include "models/text/jinja/library.h"

namespace treadle::jinja {

ArgumentReader::ArgumentReader(Context& context, std::string_view function,
                               const Arguments& arguments, std::vector<std::string_view> names,
                               size_t skip)
    : context_(context),
      function_(function),
      arguments_(arguments),
      names_(std::move(names)),
      skip_(skip) {
  if (arguments.positional.size() > names_.size() + skip) {
    context.Fail(function, " takes at most ", names_.size(), " arguments");
  }
  for (const auto& [name, unused] : arguments.named) {
    if (std::ranges::find(names_, name) == names_.end()) {
      context.Fail(function, " has no argument '", name, "'");
    }
  }
}

const Value* ArgumentReader::Get(std::string_view name) const {
  for (const auto& [given, value] : arguments_.named) {
    if (given == name) return &value;
  }
  const auto at = std::ranges::find(names_, name) - names_.begin() + static_cast<ptrdiff_t>(skip_);
  const auto index = static_cast<size_t>(at);
  return index < arguments_.positional.size() ? &arguments_.positional[index] : nullptr;
}

Value ArgumentReader::Required(std::string_view name) const {
  const Value* value = Get(name);
  if (value == nullptr) context_.Fail(function_, " needs the argument '", name, "'");
  return *value;
}

std::string ArgumentReader::String(std::string_view name) const {
  const Value value = Required(name);
  if (!value.is_string()) {
    context_.Fail(function_, ": '", name, "' is of type '", value.TypeName(), "', expected 'str'");
  }
  return value.AsString();
}

const Value* ArgumentReader::StringOrNone(std::string_view name) const {
  const Value* value = Get(name);
  if (value == nullptr || value->is_none()) return nullptr;
  String(name);
  return value;
}

int64_t ArgumentReader::Int(std::string_view name, int64_t otherwise) const {
  const Value* value = Get(name);
  if (value == nullptr || value->is_none()) return otherwise;
  if (!value->is_integral()) {
    context_.Fail(function_, ": '", name, "' is of type '", value->TypeName(), "', expected 'int'");
  }
  return value->AsInt();
}

bool ArgumentReader::Bool(std::string_view name, bool otherwise) const {
  const Value* value = Get(name);
  return value == nullptr ? otherwise : value->Truth();
}

}  // namespace treadle::jinja
