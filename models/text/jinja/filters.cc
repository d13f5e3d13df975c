#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "absl/strings/str_split.h"
#include "base/number.h"
#include "models/text/jinja/library.h"
#include "models/text/unicode.h"

namespace treadle::jinja {
namespace {

using A = const Arguments;
using C = Context;

const Value& Input(A& arguments) { return arguments.positional[0]; }
std::string InputText(C& context, A& arguments) { return Text(context, Input(arguments)); }

ArgumentReader Read(C& context, const char* name, A& arguments,
                    std::vector<std::string_view> names) {
  return ArgumentReader(context, name, arguments, std::move(names), 1);
}

// How sort, unique and dictsort compare: strings without regard to case, unless asked.
Value SortKey(C& context, const Value& value, bool case_sensitive) {
  if (case_sensitive || !value.is_string()) return value;
  return Cased(context, LowerCase, value.AsString());
}

// "a.0.b" or a number: what `attribute=` names inside an item; `otherwise` for each part that is
// not there, unless it is null.
Value Lookup(C& context, Value item, const Value& path, const Value* otherwise = nullptr) {
  const auto step = [&](const Value& part) {
    item = GetItem(context, item, part);
    if (otherwise != nullptr && item.is_undefined()) item = *otherwise;
  };
  if (!path.is_string()) {
    step(path);
    return item;
  }
  std::string_view rest = path.AsString();
  while (!rest.empty()) {
    const size_t dot = std::min(rest.find('.'), rest.size());
    const std::string_view part = rest.substr(0, dot);
    const auto number = NumberIn<int64_t>(part);
    step(number && *number >= 0 ? Value(*number) : Value::String(std::string(part)));
    rest.remove_prefix(std::min(dot + 1, rest.size()));
  }
  return item;
}

List ItemsAt(C& context, A& arguments, const Value* attribute) {
  List items = context.Items(Input(arguments));
  if (attribute == nullptr || attribute->is_none()) return items;
  for (Value& item : items) item = Lookup(context, item, *attribute);
  return items;
}

Value Trim(C& context, A& arguments) {
  const auto read = Read(context, "trim", arguments, {"chars"});
  const std::string text = InputText(context, arguments);
  return context.MakeString(std::string(Strip(text, Side::kBoth, read.StringOrNone("chars"))));
}

Value Default(C& context, A& arguments) {
  const auto read = Read(context, "default", arguments, {"default_value", "boolean"});
  const Value& input = Input(arguments);
  const bool missing = input.is_undefined() || (read.Bool("boolean", false) && !input.Truth());
  if (!missing) return input;
  const Value* otherwise = read.Get("default_value");
  return otherwise ? *otherwise : Value::String("");
}

Value Join(C& context, A& arguments) {
  const auto read = Read(context, "join", arguments, {"d", "attribute"});
  const Value* separator = read.Get("d");
  const std::string between = separator ? Text(context, *separator) : "";
  std::string out;
  bool first = true;
  for (const Value& item : ItemsAt(context, arguments, read.Get("attribute"))) {
    const std::string part = Text(context, item);
    context.Charge(between.size() + part.size());
    if (!first) out += between;
    out += part;
    first = false;
  }
  return context.MakeString(std::move(out));
}

Value ReplaceFilter(C& context, A& arguments) {
  const auto read = Read(context, "replace", arguments, {"old", "new", "count"});
  return context.MakeString(Replace(context, InputText(context, arguments), read.String("old"),
                                    read.String("new"), read.Int("count", -1)));
}

// Lines after the first move right; empty ones only with `blank`.
Value Indent(C& context, A& arguments) {
  const auto read = Read(context, "indent", arguments, {"width", "first", "blank"});
  const Value* width = read.Get("width");
  const int64_t spaces = width && width->is_string() ? 0 : read.Int("width", 4);
  if (spaces < 0 || spaces > 1000) context.Fail("indent: the width is ", spaces);
  const std::string indentation = width && width->is_string()
                                      ? width->AsString()
                                      : std::string(static_cast<size_t>(spaces), ' ');
  const bool blank = read.Bool("blank", false);
  const std::string text = InputText(context, arguments) + "\n";
  const std::vector<std::string_view> lines = SplitLines(context, text);
  context.Charge(text.size() + lines.size() * indentation.size());
  std::string out = read.Bool("first", false) ? indentation : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += "\n";
    if (i > 0 && (blank || !lines[i].empty())) out += indentation;
    out += lines[i];
  }
  return context.MakeString(std::move(out));
}

Value ToJsonFilter(C& context, A& arguments) {
  const auto read =
      Read(context, "tojson", arguments, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  if (const Value* separators = read.Get("separators"); separators && !separators->is_none()) {
    const List two = context.Items(*separators);
    if (two.size() != 2 || !two[0].is_string() || !two[1].is_string()) {
      context.Fail("tojson: the separators are ", Text(context, *separators));
    }
    style.between_items = two[0].AsString();
    style.behind_key = two[1].AsString();
  }
  const int64_t indent = read.Int("indent", -1);
  if (indent > 100) context.Fail("tojson: the indent is ", indent);
  style.indent = static_cast<int>(std::max<int64_t>(indent, -1));
  style.ascii_only = read.Bool("ensure_ascii", false);
  style.sort_keys = read.Bool("sort_keys", false);
  return context.MakeString(ToJson(context, Input(arguments), style));
}

Value Edge(C& context, A& arguments, bool last) {
  const List items = context.Items(Input(arguments));
  if (items.empty())
    return Undefined{last ? "the last item of nothing" : "the first item of nothing"};
  return last ? items.back() : items.front();
}

Value Reverse(C& context, A& arguments) {
  List items = context.Items(Input(arguments));
  std::ranges::reverse(items);
  if (!Input(arguments).is_string()) return context.MakeList(std::move(items));
  std::string text;
  for (const Value& item : items) text += item.AsString();
  return context.MakeString(std::move(text));
}

using Keyed = std::vector<std::pair<Value, Value>>;  // what is compared, and the item

Keyed KeyedItems(C& context, A& arguments, const ArgumentReader& read, bool several = false) {
  const bool case_sensitive = read.Bool("case_sensitive", false);
  const Value* attribute = read.Get("attribute");
  // "a,b": by a, and where that is equal by b.
  std::vector<Value> paths;
  if (several && attribute != nullptr && attribute->is_string()) {
    const std::vector<std::string> names = absl::StrSplit(attribute->AsString(), ',');
    for (const std::string& name : names) paths.push_back(Value::String(name));
  }
  Keyed keyed;
  for (const Value& item : context.Items(Input(arguments))) {
    List parts;
    for (const Value& path : paths) {
      parts.push_back(SortKey(context, Lookup(context, item, path), case_sensitive));
    }
    const bool whole = attribute == nullptr || attribute->is_none();
    Value key = paths.empty() ? SortKey(context, whole ? item : Lookup(context, item, *attribute),
                                        case_sensitive)
                              : context.MakeList(std::move(parts));
    keyed.emplace_back(std::move(key), item);
  }
  return keyed;
}

Value Sorted(C& context, Keyed keyed, bool reverse) {
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reverse ? context.Order(b.first, a.first) < 0 : context.Order(a.first, b.first) < 0;
  });
  List out;
  for (auto& [key, item] : keyed) out.push_back(std::move(item));
  return context.MakeList(std::move(out));
}

Value Sort(C& context, A& arguments) {
  const auto read = Read(context, "sort", arguments, {"reverse", "case_sensitive", "attribute"});
  return Sorted(context, KeyedItems(context, arguments, read, /*several=*/true),
                read.Bool("reverse", false));
}

Value ItemsFilter(C& context, A& arguments) {
  if (Input(arguments).is_undefined()) return context.MakeList({});
  if (!Input(arguments).is_dict()) context.Fail("items needs a mapping");
  return CallMethod(context, Input(arguments), "items", {});
}

Value DictSort(C& context, A& arguments) {
  const auto read = Read(context, "dictsort", arguments, {"case_sensitive", "by", "reverse"});
  if (!Input(arguments).is_dict()) context.Fail("dictsort needs a mapping");
  const bool by_value = read.Has("by") && read.String("by") == "value";
  Keyed keyed;
  for (const auto& [key, value] : Input(arguments).AsDict()) {
    const Value& by = by_value ? value : key;
    keyed.emplace_back(SortKey(context, by, read.Bool("case_sensitive", false)),
                       context.MakeList({key, value}, "tuple"));
  }
  return Sorted(context, std::move(keyed), read.Bool("reverse", false));
}

Value Unique(C& context, A& arguments) {
  const auto read = Read(context, "unique", arguments, {"case_sensitive", "attribute"});
  List seen;
  List out;
  for (const auto& [key, item] : KeyedItems(context, arguments, read)) {
    const auto is_key = [&, &wanted = key](const Value& s) { return context.Equal(s, wanted); };
    if (std::ranges::any_of(seen, is_key)) continue;
    seen.push_back(key);
    out.push_back(item);
  }
  return context.MakeList(std::move(out));
}

Value ToInt(C& context, A& arguments) {
  const auto read = Read(context, "int", arguments, {"default"});
  const Value& input = Input(arguments);
  if (input.is_integral()) return input.AsInt();
  if (input.is_big()) return input;
  double number = input.is_float() ? input.AsDouble() : std::nan("");
  if (input.is_string()) {
    const std::string_view text = Strip(input.AsString(), Side::kBoth, nullptr);
    if (const auto whole = NumberIn<int64_t>(text)) return *whole;
    if (!text.empty() && text.find_first_not_of("0123456789", text[0] == '-') == text.npos) {
      context.Fail("int: ", Cut(text, 100), " is out of range");
    }
    number = NumberIn<double>(text).value_or(number);
  }
  if (std::abs(number) < 0x1p63) return static_cast<int64_t>(number);
  if (std::isfinite(number))
    context.Fail("int: ", Text(context, Value(number)), " is out of range");
  const Value* otherwise = read.Get("default");
  return otherwise ? *otherwise : Value(int64_t{0});
}

Value ToFloat(C& context, A& arguments) {
  const auto read = Read(context, "float", arguments, {"default"});
  const Value& input = Input(arguments);
  if (input.is_number()) return input.AsDouble();
  if (input.is_string()) {
    const std::string_view text = Strip(input.AsString(), Side::kBoth, nullptr);
    if (const auto number = NumberIn<double>(text)) return *number;
  }
  const Value* otherwise = read.Get("default");
  return otherwise ? *otherwise : Value(0.0);
}

// Words begin after white space, '-' and opening brackets (unlike the method, which looks at
// letters).
Value TitleFilter(C& context, A& arguments) {
  const std::string text = InputText(context, arguments);
  context.Charge(text.size() * sizeof(std::string_view));
  std::string out, word;
  const auto finish = [&] {
    if (word.empty()) return;
    const size_t first = ReadUtf8(word).length;
    out += UpperCase(std::string_view(word).substr(0, first)) +
           LowerCase(std::string_view(word).substr(first));
    word.clear();
  };
  bool between = false;
  for (const std::string_view character : Characters(text)) {
    const bool separates = std::string_view("-({[<").find(character) != std::string_view::npos ||
                           Strip(character, Side::kLeft, nullptr).empty();
    if (separates != between) finish();
    between = separates;
    word += character;
  }
  finish();
  return context.MakeString(std::move(out));
}

// The arguments that map, select and their kin pass on: `item` for the first, less `used` names.
Arguments PassOn(A& arguments, size_t used, const Value& item) {
  Arguments passed;
  passed.positional.push_back(item);
  for (size_t i = used; i < arguments.positional.size(); ++i) {
    passed.positional.push_back(arguments.positional[i]);
  }
  passed.named = arguments.named;
  return passed;
}

std::string NameAt(C& context, A& arguments, size_t at, const char* function) {
  if (at >= arguments.positional.size() || !arguments.positional[at].is_string()) {
    context.Fail(function, " needs a name");
  }
  return arguments.positional[at].AsString();
}

Value Map(C& context, A& arguments) {
  List out;
  if (!Input(arguments).Truth()) return context.MakeList({});  // also none, unlike elsewhere
  const bool by_attribute = arguments.positional.size() == 1;
  if (by_attribute) {
    const auto read = Read(context, "map", arguments, {"attribute", "default"});
    const Value attribute = read.Required("attribute");
    const Value* otherwise = read.Get("default");
    for (const Value& item : context.Items(Input(arguments))) {
      out.push_back(Lookup(context, item, attribute, otherwise));
    }
    return context.MakeList(std::move(out));
  }
  const std::string name = NameAt(context, arguments, 1, "map");
  const Filter filter = FindFilter(name);
  if (filter == nullptr) context.Fail("there is no filter '", name, "'");
  for (const Value& item : context.Items(Input(arguments))) {
    out.push_back(filter(context, PassOn(arguments, 2, item)));
  }
  return context.MakeList(std::move(out));
}

Value Choose(C& context, A& arguments, bool by_attribute, bool wanted) {
  if (!Input(arguments).Truth()) return context.MakeList({});  // also none, unlike elsewhere
  const size_t at = by_attribute ? 2 : 1;  // of the test's name, which may be missing
  Value attribute;
  if (by_attribute) attribute = Value::String(NameAt(context, arguments, 1, "selectattr"));
  Test test = nullptr;
  if (arguments.positional.size() > at) {
    const std::string name = NameAt(context, arguments, at, "select");
    test = FindTest(name);
    if (test == nullptr) context.Fail("there is no test '", name, "'");
  }
  List out;
  for (const Value& item : context.Items(Input(arguments))) {
    const Value tested = by_attribute ? Lookup(context, item, attribute) : item;
    const bool result = test ? test(context, PassOn(arguments, at + 1, tested)) : tested.Truth();
    if (result == wanted) out.push_back(item);
  }
  return context.MakeList(std::move(out));
}

// The smallest or greatest item, the first of equals; undefined if there is none.
Value Extreme(C& context, A& arguments, bool greatest) {
  const auto read = Read(context, "min or max", arguments, {"case_sensitive", "attribute"});
  const Keyed keyed = KeyedItems(context, arguments, read);
  if (keyed.empty()) return Undefined{"the extreme of nothing"};
  auto best = keyed.begin();
  for (auto other = best + 1; other != keyed.end(); ++other) {
    const int order = context.Order(other->first, best->first);
    if (greatest ? order > 0 : order < 0) best = other;
  }
  return best->second;
}

Value Absolute(C& context, A& arguments) {
  const Value& input = Input(arguments);
  if (input.is_float()) return std::abs(input.AsDouble());
  if (!input.is_integral() || input.AsInt() == INT64_MIN) context.Fail("abs needs a number");
  return std::abs(input.AsInt());
}

}  // namespace

Filter FindFilter(std::string_view name) {
  static const std::unordered_map<std::string_view, Filter> filters = {
      {"trim", Trim},
      {"default", Default},
      {"d", Default},
      {"join", Join},
      {"replace", ReplaceFilter},
      {"indent", Indent},
      {"tojson", ToJsonFilter},
      {"reverse", Reverse},
      {"sort", Sort},
      {"dictsort", DictSort},
      {"items", ItemsFilter},
      {"unique", Unique},
      {"int", ToInt},
      {"float", ToFloat},
      {"title", TitleFilter},
      {"map", Map},
      {"abs", Absolute},
      {"min", [](C& c, A& a) { return Extreme(c, a, false); }},
      {"max", [](C& c, A& a) { return Extreme(c, a, true); }},
      {"first", [](C& c, A& a) { return Edge(c, a, false); }},
      {"last", [](C& c, A& a) { return Edge(c, a, true); }},
      {"select", [](C& c, A& a) { return Choose(c, a, false, true); }},
      {"reject", [](C& c, A& a) { return Choose(c, a, false, false); }},
      {"selectattr", [](C& c, A& a) { return Choose(c, a, true, true); }},
      {"rejectattr", [](C& c, A& a) { return Choose(c, a, true, false); }},
      {"length", [](C& c, A& a) { return Value(c.Length(Input(a))); }},
      {"count", [](C& c, A& a) { return Value(c.Length(Input(a))); }},
      {"list", [](C& c, A& a) { return c.MakeList(c.Items(Input(a))); }},
      {"string", [](C& c, A& a) { return c.MakeString(InputText(c, a)); }},
      {"upper", [](C& c, A& a) { return Cased(c, UpperCase, InputText(c, a)); }},
      {"lower", [](C& c, A& a) { return Cased(c, LowerCase, InputText(c, a)); }},
      {"capitalize", [](C& c, A& a) { return Cased(c, Capitalized, InputText(c, a)); }},
      // Output is never escaped, so everything is safe.
      {"safe", [](C& c, A& a) { return c.MakeString(InputText(c, a)); }},
  };
  const auto found = filters.find(name);
  return found == filters.end() ? nullptr : found->second;
}

}  // namespace treadle::jinja
