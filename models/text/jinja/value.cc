#include "models/text/jinja/value.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "models/text/unicode.h"

namespace treadle::jinja {
namespace {

bool SameKey(const Value& a, const Value& b) {
  if (a.is_string() || b.is_string()) {
    return a.is_string() && b.is_string() && a.AsString() == b.AsString();
  }
  return a.KeyText() == b.KeyText();
}

}  // namespace

bool Value::Truth() const {
  if (is_bool()) return AsBool();
  if (is_int()) return AsInt() != 0;
  if (is_float()) return AsDouble() != 0;
  if (is_string()) return !AsString().empty();
  if (is_list()) return !AsList().empty();
  if (is_dict()) return !AsDict().empty();
  return is_namespace() || is_callable() || is_big();
}

std::string_view Value::TypeName() const {
  if (is_list() && !ListForm().empty()) {
    const std::string_view form = ListForm();
    return form.substr(0, form.find('('));
  }
  static constexpr std::string_view kNames[] = {"undefined", "NoneType", "bool", "int",
                                                "float",     "str",      "list", "dict",
                                                "namespace", "function", "int"};
  return kNames[data_.index()];
}

int Value::depth() const {
  if (is_list()) return std::get<ListPtr>(data_)->depth;
  if (is_dict()) return std::get<DictPtr>(data_)->depth;
  if (is_callable()) return AsCallee().depth;
  // A namespace can change, so one inside another value could come to hold itself.
  return is_namespace() ? Context::kMaxValueDepth : 0;
}

std::string Value::KeyText() const {
  if (is_string()) return "s" + AsString();
  if (is_none()) return "n";
  if (is_integral()) return Str("i", AsInt());
  const double number = AsDouble();
  const bool whole = std::abs(number) < 0x1p63 && number == std::trunc(number);
  if (whole) return Str("i", static_cast<int64_t>(number));
  return Str("f", std::bit_cast<uint64_t>(number));
}

void Context::Step(int64_t steps) {
  constexpr int64_t kLook = 4096;  // at the clock, every so many steps
  const bool look = steps_ / kLook != (steps_ + steps) / kLook;
  steps_ += steps;
  if (steps_ > budget_.steps) {
    throw TemplateError{line, Str("the template takes more than ", budget_.steps, " steps"),
                        absl::StatusCode::kResourceExhausted};
  }
  if (look && std::chrono::steady_clock::now() > budget_.deadline) {
    throw TemplateError{line, "the request's deadline has passed",
                        absl::StatusCode::kDeadlineExceeded};
  }
}

void Context::Charge(size_t bytes) {
  if (bytes > budget_.bytes - bytes_) {
    throw TemplateError{line, Str("the template needs more than ", budget_.bytes, " bytes"),
                        absl::StatusCode::kResourceExhausted};
  }
  bytes_ += bytes;
  Read(bytes);
}

const Value* Context::Find(const Value& dict, const Value& key) {
  Step(static_cast<int64_t>(1 + dict.AsDict().size() / 8));
  if (!key.is_key()) return nullptr;
  for (const auto& [name, value] : dict.AsDict()) {
    if (SameKey(name, key)) return &value;
  }
  return nullptr;
}

void Context::Enter() {
  Step();
  if (++depth_ > kMaxDepth) Fail("the template nests more than ", kMaxDepth, " levels");
}

Value Context::MakeString(std::string text) {
  Charge(text.size());
  return Value::String(std::move(text));
}

int Context::DepthAround(const List& values) const {
  int depth = 0;
  for (const Value& value : values) depth = std::max(depth, value.depth());
  if (depth >= kMaxValueDepth) Fail("values are nested too deeply, or a namespace is inside one");
  return depth + 1;
}

Value Context::MakeList(List items, std::string form) {
  Charge(items.size() * sizeof(Value));
  const int depth = DepthAround(items);
  return Value(Value::ListPtr(std::make_shared<const Value::Nested<List>>(
      Value::Nested<List>{std::move(items), depth, std::move(form)})));
}

Value Context::MakeDict(Dict items) {
  Charge(items.size() * sizeof(Dict::value_type));
  int depth = 0;
  for (const auto& [key, value] : items) depth = std::max(depth, value.depth());
  if (depth >= kMaxValueDepth) Fail("values are nested too deeply, or a namespace is inside one");
  return Value(Value::DictPtr(std::make_shared<const Value::Nested<Dict>>(
      Value::Nested<Dict>{std::move(items), depth + 1})));
}

bool Context::Equal(const Value& a, const Value& b) {
  Step();
  if (a.is_integral() && b.is_integral()) return a.AsInt() == b.AsInt();
  if (a.is_number() && b.is_number()) return a.AsDouble() == b.AsDouble();
  if (a.is_string() && b.is_string()) {
    Read(std::min(a.AsString().size(), b.AsString().size()));
    return a.AsString() == b.AsString();
  }
  if (a.is_list() && b.is_list()) {
    return a.TypeName() == b.TypeName() &&
           std::ranges::equal(a.AsList(), b.AsList(),
                              [this](const Value& x, const Value& y) { return Equal(x, y); });
  }
  if (a.is_dict() && b.is_dict()) {
    if (a.AsDict().size() != b.AsDict().size()) return false;
    for (const auto& [key, value] : a.AsDict()) {
      const Value* other = Find(b, key);
      if (other == nullptr || !Equal(value, *other)) return false;
    }
    return true;
  }
  if (a.is_big() && b.is_big()) return a.AsBig() == b.AsBig();
  if (a.is_namespace() && b.is_namespace()) return &a.AsNamespace() == &b.AsNamespace();
  return (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined());
}

int Context::Order(const Value& a, const Value& b) {
  Step();
  const auto order = [](const auto& x, const auto& y) { return x < y ? -1 : x > y ? 1 : 0; };
  if (a.is_integral() && b.is_integral()) return order(a.AsInt(), b.AsInt());
  if (a.is_number() && b.is_number()) return order(a.AsDouble(), b.AsDouble());
  if (a.is_string() && b.is_string()) {
    Read(std::min(a.AsString().size(), b.AsString().size()));
    return order(a.AsString(), b.AsString());
  }
  if (a.is_list() && b.is_list() && a.TypeName() == b.TypeName()) {
    const size_t shared = std::min(a.AsList().size(), b.AsList().size());
    for (size_t i = 0; i < shared; ++i) {
      if (const int result = Order(a.AsList()[i], b.AsList()[i]); result != 0) return result;
    }
    return order(a.AsList().size(), b.AsList().size());
  }
  Fail("'", a.TypeName(), "' and '", b.TypeName(), "' have no order");
}

List Context::Items(const Value& value) {
  if (value.is_undefined()) return {};
  List items;
  if (value.is_list()) {
    items = value.AsList();
  } else if (value.is_dict()) {
    for (const auto& [key, unused] : value.AsDict()) items.push_back(key);
  } else if (value.is_string()) {
    Charge(value.AsString().size() * sizeof(Value));
    for (std::string_view character : Characters(value.AsString())) {
      items.push_back(MakeString(std::string(character)));
    }
  } else {
    Fail("'", value.TypeName(), "' object is not iterable");
  }
  Step(static_cast<int64_t>(items.size()));
  return items;
}

int64_t Context::Length(const Value& value) {
  if (value.is_undefined()) return 0;
  if (value.is_list()) return static_cast<int64_t>(value.AsList().size());
  if (value.is_dict()) return static_cast<int64_t>(value.AsDict().size());
  if (value.is_string()) {
    Read(value);
    return static_cast<int64_t>(CountCharacters(value.AsString()));
  }
  Fail("object of type '", value.TypeName(), "' has no length");
}

bool Context::Contains(const Value& container, const Value& item) {
  if (container.is_string()) {
    if (!item.is_string()) Fail("'in <string>' requires a string, not '", item.TypeName(), "'");
    Read(container);
    Read(item);
    return FindText(container.AsString(), item.AsString()) != std::string_view::npos;
  }
  if (container.is_dict()) return Find(container, item) != nullptr;
  if (container.is_undefined()) return false;
  if (!container.is_list()) Fail("'", container.TypeName(), "' cannot contain anything");
  return std::ranges::any_of(container.AsList(), [&](const Value& x) { return Equal(x, item); });
}

size_t FindText(std::string_view text, std::string_view part) {
  const void* at = memmem(text.data(), text.size(), part.data(), part.size());
  return at == nullptr ? text.npos
                       : static_cast<size_t>(static_cast<const char*>(at) - text.data());
}

std::vector<std::string_view> Characters(std::string_view text) {
  std::vector<std::string_view> characters;
  for (size_t at = 0; at < text.size();) {
    const size_t length = ReadUtf8(text.substr(at)).length;
    characters.push_back(text.substr(at, length));
    at += length;
  }
  return characters;
}

}  // namespace treadle::jinja
