#include <ctime>
#include <memory>
#include <unordered_map>
#include <utility>

#include "base/utf8.h"
#include "models/text/jinja/library.h"

namespace treadle::jinja {
namespace {

constexpr int64_t kMaxRange = 100'000;

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
  const std::string form = step == 1 ? Str("range(", first, ", ", stop, ")")
                                     : Str("range(", first, ", ", stop, ", ", step, ")");
  List items;
  for (int64_t i = first; step > 0 ? i < stop : i > stop;) {
    if (items.size() == kMaxRange) context.Fail("range holds more than ", kMaxRange);
    context.Step();
    items.push_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return context.MakeList(std::move(items), form);
}

// Arguments of dict(...) and namespace(...): a dictionary or pairs, and named values, the last of
// a name.
Dict Members(Context& context, const char* function, const Arguments& arguments) {
  Dict items;
  std::unordered_map<std::string, size_t> places;
  const auto put = [&](const Value& key, const Value& value) {
    if (!key.is_key()) context.Fail(function, ": a key is of type '", key.TypeName(), "'");
    std::string text = key.KeyText();
    context.Charge(2 * text.size() + sizeof(Dict::value_type));
    const auto [place, added] = places.emplace(std::move(text), items.size());
    if (added) items.emplace_back(key, Value());
    items[place->second].second = value;
  };
  if (arguments.positional.size() > 1)
    context.Fail(function, " takes one argument, and named ones");
  for (const Value& from : arguments.positional) {
    if (from.is_dict()) {
      for (const auto& [key, value] : from.AsDict()) put(key, value);
      continue;
    }
    for (const Value& item : context.Items(from)) {
      const List pair = context.Items(item);
      if (pair.size() != 2) context.Fail(function, " takes a dictionary or pairs");
      put(pair[0], pair[1]);
    }
  }
  for (const auto& [name, value] : arguments.named) put(Value::String(name), value);
  return items;
}

Value MakeNamespace(Context& context, const Arguments& arguments) {
  Namespace attributes;
  for (auto& [name, value] : Members(context, "namespace", arguments)) {
    context.DepthAround({value});
    if (!name.is_string()) context.Fail("namespace: a name is of type '", name.TypeName(), "'");
    context.Charge(name.AsString().size() + 2 * sizeof(Dict::value_type));
    attributes.insert_or_assign(name.AsString(), value);
  }
  return Value::NewNamespace(std::move(attributes));
}

Value MakeDictionary(Context& context, const Arguments& arguments) {
  return context.MakeDict(Members(context, "dict", arguments));
}

// cycler(a, b): next() goes round, reset() begins again, current is the next one.
Value MakeCycler(Context& context, const Arguments& arguments) {
  if (arguments.positional.empty() || !arguments.named.empty()) context.Fail("cycler needs items");
  const auto at = std::make_shared<size_t>(0);
  const List items = arguments.positional;
  const int depth = context.DepthAround(items);
  const Value cycler = Value::NewNamespace({{"current", items[0]}});
  // The namespace holds its functions, which must not hold it.
  const auto move = [at, items, self = cycler.WeakNamespace()](bool reset) -> Value {
    const Value current = items[*at];
    *at = reset ? 0 : (*at + 1) % items.size();
    if (const auto attributes = self.lock()) attributes->insert_or_assign("current", items[*at]);
    return reset ? Value(None{}) : current;
  };
  cycler.AsNamespace().emplace(
      "next",
      Value::Callable([move](Context&, const Arguments&) { return move(false); }, {}, depth));
  cycler.AsNamespace().emplace(
      "reset",
      Value::Callable([move](Context&, const Arguments&) { return move(true); }, {}, depth));
  return cycler;
}

// joiner(", "): nothing the first time that it is called, then the separator.
Value MakeJoiner(Context& context, const Arguments& arguments) {
  const ArgumentReader read(context, "joiner", arguments, {"sep"});
  const Value separator = read.Has("sep") ? *read.Get("sep") : Value(", ");
  const auto call = [separator, used = std::make_shared<bool>(false)](Context&, const Arguments&) {
    return std::exchange(*used, true) ? separator : Value("");
  };
  return Value::Callable(call, {}, context.DepthAround({separator}));
}

Value RaiseException(Context& context, const Arguments& arguments) {
  const ArgumentReader read(context, "raise_exception", arguments, {"message"});
  constexpr size_t kMax = 500;
  context.Fail("the template raised: ", Cut(Text(context, read.Required("message")), kMax));
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
  constexpr size_t kMaxFormat = 200;
  if (format.size() > kMaxFormat) context.Fail("strftime_now: the format is too long");
  char buffer[kMaxFormat * 32];
  const size_t length = std::strftime(buffer, sizeof(buffer), format.c_str(), &date);
  return context.MakeString(std::string(buffer, length));
}

}  // namespace

Named GlobalFunctions(const std::string& now) {
  const auto strftime_now = [now](Context& context, const Arguments& arguments) {
    return FormatNow(context, now, arguments);
  };
  return {{"range", Value::Callable(Range)},
          {"namespace", Value::Callable(MakeNamespace)},
          {"dict", Value::Callable(MakeDictionary)},
          {"cycler", Value::Callable(MakeCycler)},
          {"joiner", Value::Callable(MakeJoiner)},
          {"raise_exception", Value::Callable(RaiseException)},
          {"strftime_now", Value::Callable(strftime_now)}};
}

}  // namespace treadle::jinja
