#include <ctime>

#include "base/utf8.h"
#include "models/text/jinja/library.h"

namespace treadle::jinja {
namespace {

constexpr int64_t kLongestRange = 100'000;

Value Range(Context& context, const Arguments& arguments) {
  std::vector<int64_t> bounds;
  for (const Value& bound : arguments.positional) {
    if (!bound.is_integral()) context.Fail("range needs integers, not '", bound.TypeName(), "'");
    bounds.push_back(bound.AsInt());
  }
  if (bounds.empty() || bounds.size() > 3 || !arguments.named.empty()) {
    context.Fail("range takes one to three numbers");
  }
  const int64_t first = bounds.size() > 1 ? bounds[0] : 0;
  const int64_t stop = bounds.size() > 1 ? bounds[1] : bounds[0];
  const int64_t step = bounds.size() > 2 ? bounds[2] : 1;
  if (step == 0) context.Fail("range: the step is 0");
  List items;
  for (int64_t i = first; step > 0 ? i < stop : i > stop;) {
    if (items.size() == kLongestRange) context.Fail("range holds more than ", kLongestRange);
    context.Step();
    items.push_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return context.MakeList(std::move(items));
}

Dict Named(Context& context, const char* function, const Arguments& arguments) {
  if (arguments.positional.empty()) return arguments.named;
  if (arguments.positional.size() > 1 || !arguments.positional[0].is_dict()) {
    context.Fail(function, " takes named arguments, or a dictionary before them");
  }
  context.Charge(arguments.positional[0].AsDict().size() * sizeof(Dict::value_type));
  Dict items = arguments.positional[0].AsDict();
  for (const auto& [name, value] : arguments.named) items.emplace_back(name, value);
  return items;
}

Value MakeNamespace(Context& context, const Arguments& arguments) {
  Namespace attributes;
  for (auto& [name, value] : Named(context, "namespace", arguments)) {
    if (value.is_namespace()) context.Fail("a namespace cannot hold another");
    context.Charge(name.size() + 2 * sizeof(Dict::value_type));
    attributes.insert_or_assign(name, value);
  }
  return Value::NewNamespace(std::move(attributes));
}

Value MakeDictionary(Context& context, const Arguments& arguments) {
  return context.MakeDict(Named(context, "dict", arguments));
}

Value RaiseException(Context& context, const Arguments& arguments) {
  const ArgumentReader read(context, "raise_exception", arguments, {"message"});
  constexpr size_t kLongest = 500;
  context.Fail("the template raised: ", Cut(Text(context, read.Required("message")), kLongest));
}

// False where `text` is no date.
bool ReadDate(const std::string& text, std::tm* out) {
  std::tm date = {};
  const char* rest = strptime(text.c_str(), "%Y-%m-%d", &date);
  if (rest != nullptr && *rest != '\0') rest = strptime(rest, " %H:%M:%S", &date);
  if (rest == nullptr || *rest != '\0') return false;
  *out = date;
  return true;
}

Value FormatNow(Context& context, const std::string& now, const Arguments& arguments) {
  const ArgumentReader read(context, "strftime_now", arguments, {"format"});
  const std::string format = read.String("format");
  std::tm date = {};
  if (now.empty()) {
    const std::time_t seconds = std::time(nullptr);
    localtime_r(&seconds, &date);
  } else if (!ReadDate(now, &date)) {
    context.Fail("the variable 'now' is '", now, "', expected 'YYYY-MM-DD [HH:MM:SS]'");
  }
  constexpr size_t kLongestFormat = 200;
  if (format.size() > kLongestFormat) context.Fail("strftime_now: the format is too long");
  char buffer[kLongestFormat * 32];
  const size_t length = std::strftime(buffer, sizeof(buffer), format.c_str(), &date);
  return context.MakeString(std::string(buffer, length));
}

}  // namespace

Dict GlobalFunctions(const std::string& now) {
  const auto strftime_now = [now](Context& context, const Arguments& arguments) {
    return FormatNow(context, now, arguments);
  };
  return {{"range", Value::Callable(Range)},
          {"namespace", Value::Callable(MakeNamespace)},
          {"dict", Value::Callable(MakeDictionary)},
          {"raise_exception", Value::Callable(RaiseException)},
          {"strftime_now", Value::Callable(strftime_now)}};
}

}  // namespace treadle::jinja
