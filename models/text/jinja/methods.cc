#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "models/text/jinja/library.h"
#include "models/text/unicode.h"

namespace treadle::jinja {
namespace {

// White space as Python's str methods see it.
bool IsPythonSpace(char32_t c) { return IsWhiteSpace(c) || (c >= 0x1C && c <= 0x1F); }

using Pieces = std::vector<std::string_view>;

// Where the last character of the first `end` bytes begins.
size_t LastCharacter(std::string_view text, size_t end) {
  size_t start = end - 1;
  while (start > 0 && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80) --start;
  return start;
}

void AddPiece(Context& context, std::string_view piece, Pieces* pieces) {
  context.Charge(sizeof(piece));
  pieces->push_back(piece);
}

Pieces SplitOnSpace(Context& context, std::string_view text, int64_t most) {
  Pieces pieces;
  for (;;) {
    text = Strip(text, Side::kLeft, nullptr);
    if (text.empty()) return pieces;
    if (most >= 0 && static_cast<int64_t>(pieces.size()) == most) {
      AddPiece(context, Strip(text, Side::kRight, nullptr), &pieces);
      return pieces;
    }
    size_t end = 0;
    while (end < text.size()) {
      const Utf8Front front = ReadUtf8(text.substr(end));
      if (IsPythonSpace(front.character)) break;
      end += front.length;
    }
    AddPiece(context, text.substr(0, end), &pieces);
    text.remove_prefix(end);
  }
}

Pieces SplitOn(Context& context, std::string_view text, std::string_view separator, int64_t most) {
  Pieces pieces;
  while (most < 0 || static_cast<int64_t>(pieces.size()) < most) {
    const size_t at = FindText(text, separator);
    if (at == text.npos) break;
    AddPiece(context, text.substr(0, at), &pieces);
    text.remove_prefix(at + separator.size());
    context.Read(separator.size());  // which every search looks at anew
  }
  AddPiece(context, text, &pieces);
  return pieces;
}

// Both texts backwards are split from the left: there is no search from the right in linear time.
Pieces SplitFromRight(Context& context, std::string_view text, std::string_view separator,
                      int64_t most) {
  context.Charge(text.size() + separator.size());
  const std::string mirrored(text.rbegin(), text.rend());
  const std::string mirror(separator.rbegin(), separator.rend());
  Pieces pieces = SplitOn(context, mirrored, mirror, most);
  for (std::string_view& piece : pieces) {
    const auto from_end = static_cast<size_t>(piece.data() - mirrored.data());
    piece = text.substr(text.size() - from_end - piece.size(), piece.size());
  }
  std::ranges::reverse(pieces);
  return pieces;
}

// As SplitOnSpace, from the right.
Pieces SplitOnSpaceFromRight(Context& context, std::string_view text, int64_t most) {
  Pieces pieces;
  for (;;) {
    text = Strip(text, Side::kRight, nullptr);
    if (text.empty()) break;
    if (static_cast<int64_t>(pieces.size()) == most) {
      AddPiece(context, text, &pieces);
      break;
    }
    size_t begin = text.size();
    while (begin > 0) {
      const size_t start = LastCharacter(text, begin);
      if (IsPythonSpace(ReadUtf8(text.substr(start)).character)) break;
      begin = start;
    }
    AddPiece(context, text.substr(begin), &pieces);
    text = text.substr(0, begin);
  }
  std::ranges::reverse(pieces);
  return pieces;
}

Value ListOf(Context& context, const Pieces& pieces) {
  List items;
  for (std::string_view piece : pieces) items.push_back(context.MakeString(std::string(piece)));
  return context.MakeList(std::move(items));
}

Value Split(Context& context, const std::string& text, const Arguments& arguments, bool right) {
  const ArgumentReader read(context, "split", arguments, {"sep", "maxsplit"});
  const Value* separator = read.StringOrNone("sep");
  const int64_t most = read.Int("maxsplit", -1);
  if (separator == nullptr) {
    return ListOf(context, right && most >= 0 ? SplitOnSpaceFromRight(context, text, most)
                                              : SplitOnSpace(context, text, most));
  }
  const std::string& by = separator->AsString();
  if (by.empty()) context.Fail("split: empty separator");
  return ListOf(context,
                right ? SplitFromRight(context, text, by, most) : SplitOn(context, text, by, most));
}

// The part of `text` that starts and ends at these arguments, as Python slices; nothing if it
// starts behind the end.
std::optional<std::string_view> Part(Context& context, const std::string& text,
                                     const ArgumentReader& read) {
  if (!read.Has("start") && !read.Has("end")) return text;
  context.Charge(text.size() * sizeof(std::string_view));
  const Pieces characters = Characters(text);
  const auto length = static_cast<int64_t>(characters.size());
  const auto bound = [&](const char* name, int64_t otherwise) {
    const int64_t at = std::clamp(read.Int(name, otherwise), -length, length + 1);
    return at < 0 ? at + length : at;
  };
  const int64_t start = bound("start", 0), end = std::min(bound("end", length), length);
  if (start > end) return std::nullopt;
  const auto offset = [&](int64_t at) {
    return at < length
               ? static_cast<size_t>(characters[static_cast<size_t>(at)].data() - text.data())
               : text.size();
  };
  return std::string_view(text).substr(offset(start), offset(end) - offset(start));
}

Value Affix(Context& context, const std::string& text, const Arguments& arguments, bool at_end) {
  const ArgumentReader read(context, "startswith or endswith", arguments,
                            {"prefix", "start", "end"});
  const Value affix = read.Required("prefix");
  const bool tuple = affix.is_list() && affix.ListForm() == "tuple";
  const List candidates = tuple ? affix.AsList() : List{affix};
  const std::optional<std::string_view> part = Part(context, text, read);
  return std::ranges::any_of(candidates, [&](const Value& one) {
    if (!one.is_string()) context.Fail("startswith and endswith need a string or a tuple of them");
    return part && (at_end ? part->ends_with(one.AsString()) : part->starts_with(one.AsString()));
  });
}

Value StripMethod(Context& context, const std::string& text, const Arguments& arguments,
                  Side side) {
  const ArgumentReader read(context, "strip", arguments, {"chars"});
  return context.MakeString(std::string(Strip(text, side, read.StringOrNone("chars"))));
}

Value ReplaceMethod(Context& context, const std::string& text, const Arguments& arguments) {
  const ArgumentReader read(context, "replace", arguments, {"old", "new", "count"});
  return context.MakeString(
      Replace(context, text, read.String("old"), read.String("new"), read.Int("count", -1)));
}

Value JoinMethod(Context& context, const std::string& text, const Arguments& arguments) {
  std::string out;
  const Value list = ArgumentReader(context, "join", arguments, {"iterable"}).Required("iterable");
  bool first = true;
  for (const Value& item : context.Items(list)) {
    if (!item.is_string()) context.Fail("join needs strings, not '", item.TypeName(), "'");
    context.Charge(text.size() + item.AsString().size());
    out += (first ? "" : text) + item.AsString();
    first = false;
  }
  return context.MakeString(std::move(out));
}

// Fields without a format: {}, {0}, {name}; {{ and }} for braces.
Value FormatMethod(Context& context, const std::string& text, const Arguments& arguments) {
  std::string out;
  size_t automatic = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if ((c == '{' || c == '}') && i + 1 < text.size() && text[i + 1] == c) {
      out.push_back(c);
      ++i;
    } else if (c == '{') {
      const size_t end = text.find('}', i);
      if (end == text.npos) context.Fail("format: '}' is missing");
      const std::string field = text.substr(i + 1, end - i - 1);
      const bool number = field.find_first_not_of("0123456789") == field.npos && field.size() < 6;
      const size_t index = field.empty() ? automatic++ : number ? std::stoul(field) : SIZE_MAX;
      const Value* value = nullptr;
      if (index < arguments.positional.size()) value = &arguments.positional[index];
      context.Step(static_cast<int64_t>(1 + arguments.named.size()));
      for (const auto& [name, named] : arguments.named) {
        if (name == field) value = &named;
      }
      if (value == nullptr)
        context.Fail("format: there is no argument for '{", Cut(field, 100), "}'");
      const std::string part = Text(context, *value);
      context.Charge(part.size());
      out += part;
      i = end;
    } else {
      out.push_back(c);
    }
  }
  return context.MakeString(std::move(out));
}

// An affix that is there is taken away.
Value RemoveAffix(Context& context, const std::string& text, const Arguments& arguments,
                  bool at_end) {
  const std::string affix =
      ArgumentReader(context, "removeprefix or removesuffix", arguments, {"affix"}).String("affix");
  if (at_end && text.ends_with(affix)) {
    return context.MakeString(text.substr(0, text.size() - affix.size()));
  }
  if (!at_end && text.starts_with(affix)) return context.MakeString(text.substr(affix.size()));
  return Value::String(text);
}

Value FindMethod(Context& context, const std::string& text, const Arguments& arguments) {
  const ArgumentReader read(context, "find", arguments, {"sub", "start", "end"});
  const std::string sought = read.String("sub");
  const std::optional<std::string_view> part = Part(context, text, read);
  const size_t at = part ? FindText(*part, sought) : text.npos;
  if (at == text.npos) return int64_t{-1};
  const auto before = static_cast<size_t>(part->data() - text.data()) + at;
  return static_cast<int64_t>(CountCharacters(std::string_view(text).substr(0, before)));
}

Value CountMethod(Context& context, const std::string& text, const Arguments& arguments) {
  const std::string part = ArgumentReader(context, "count", arguments, {"sub"}).String("sub");
  if (part.empty()) return static_cast<int64_t>(CountCharacters(text) + 1);
  return static_cast<int64_t>(SplitOn(context, text, part, -1).size()) - 1;
}

using StringMethod = Value (*)(Context&, const std::string&, const Arguments&);
const std::unordered_map<std::string_view, StringMethod>& StringMethods() {
  using C = Context;
  using S = const std::string;
  using A = const Arguments;
  static const std::unordered_map<std::string_view, StringMethod> methods = {
      {"strip", [](C& c, S& s, A& a) { return StripMethod(c, s, a, Side::kBoth); }},
      {"lstrip", [](C& c, S& s, A& a) { return StripMethod(c, s, a, Side::kLeft); }},
      {"rstrip", [](C& c, S& s, A& a) { return StripMethod(c, s, a, Side::kRight); }},
      {"split", [](C& c, S& s, A& a) { return Split(c, s, a, false); }},
      {"rsplit", [](C& c, S& s, A& a) { return Split(c, s, a, true); }},
      {"splitlines", [](C& c, S& s, A&) { return ListOf(c, SplitLines(c, s)); }},
      {"startswith", [](C& c, S& s, A& a) { return Affix(c, s, a, false); }},
      {"endswith", [](C& c, S& s, A& a) { return Affix(c, s, a, true); }},
      {"removeprefix", [](C& c, S& s, A& a) { return RemoveAffix(c, s, a, false); }},
      {"removesuffix", [](C& c, S& s, A& a) { return RemoveAffix(c, s, a, true); }},
      {"replace", ReplaceMethod},
      {"join", JoinMethod},
      {"format", FormatMethod},
      {"find", FindMethod},
      {"count", CountMethod},
      {"upper", [](C& c, S& s, A&) { return Cased(c, UpperCase, s); }},
      {"lower", [](C& c, S& s, A&) { return Cased(c, LowerCase, s); }},
      {"title", [](C& c, S& s, A&) { return Cased(c, TitleCase, s); }},
      {"capitalize", [](C& c, S& s, A&) { return Cased(c, Capitalized, s); }},
      {"isdigit",
       [](C&, S& s, A&) {
         return Value(!s.empty() && s.find_first_not_of("0123456789") == s.npos);
       }},
  };
  return methods;
}

Value DictMethod(Context& context, const Value& object, std::string_view method,
                 const Arguments& arguments) {
  if (method == "get") {
    const ArgumentReader read(context, "get", arguments, {"key", "default"});
    const Value key = read.Required("key");
    const Value* found = context.Find(object, key);
    const Value* otherwise = read.Get("default");
    return found ? *found : otherwise ? *otherwise : Value(None{});
  }
  if (method == "copy") return object;
  List list;
  for (const auto& [key, value] : object.AsDict()) {
    context.Step();
    if (method == "keys") {
      list.push_back(key);
    } else if (method == "values") {
      list.push_back(value);
    } else {
      list.push_back(context.MakeList({key, value}, "tuple"));
    }
  }
  return context.MakeList(std::move(list), Str("dict_", method));
}

}  // namespace

std::string_view Strip(std::string_view text, Side side, const Value* characters) {
  const Pieces all = characters ? Characters(characters->AsString()) : Pieces{};
  const std::unordered_set<std::string_view> set(all.begin(), all.end());
  const auto stripped = [&](std::string_view one) {
    return characters ? set.contains(one) : IsPythonSpace(ReadUtf8(one).character);
  };
  while (side != Side::kRight && !text.empty()) {
    const size_t length = ReadUtf8(text).length;
    if (!stripped(text.substr(0, length))) break;
    text.remove_prefix(length);
  }
  while (side != Side::kLeft && !text.empty()) {
    const size_t start = LastCharacter(text, text.size());
    if (!stripped(text.substr(start))) break;
    text = text.substr(0, start);
  }
  return text;
}

std::vector<std::string_view> SplitLines(Context& context, std::string_view text) {
  Pieces lines;
  size_t start = 0;
  for (size_t at = 0; at < text.size();) {
    const Utf8Front front = ReadUtf8(text.substr(at));
    const char32_t c = front.character;
    size_t end = at + front.length;
    if ((c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 ||
        c == 0x2029) {
      AddPiece(context, text.substr(start, at - start), &lines);
      if (c == '\r' && text.substr(end).starts_with('\n')) ++end;
      start = end;
    }
    at = end;
  }
  if (start < text.size()) AddPiece(context, text.substr(start), &lines);
  return lines;
}

std::string Replace(Context& context, std::string_view text, std::string_view from,
                    std::string_view to, int64_t count) {
  Pieces pieces;
  if (from.empty()) {
    context.Charge(text.size() * (sizeof(std::string_view) + to.size()));
    // Python puts `to` before every character and at the end, `count` times at most.
    pieces.push_back("");
    for (const std::string_view character : Characters(text)) {
      const bool whole = count >= 0 && static_cast<int64_t>(pieces.size()) > count;
      if (whole) {
        const auto at = static_cast<size_t>(character.data() - text.data());
        pieces.back() = text.substr(at - pieces.back().size());
        break;
      }
      pieces.push_back(character);
    }
    if (count < 0 || static_cast<int64_t>(pieces.size()) <= count) pieces.push_back("");
  } else {
    pieces = SplitOn(context, text, from, count);
  }
  context.Charge(text.size() + pieces.size() * to.size());
  std::string out(pieces[0]);
  for (size_t i = 1; i < pieces.size(); ++i) (out += to) += pieces[i];
  return out;
}

Value Cased(Context& context, std::string (*convert)(std::string_view), std::string_view text) {
  context.Step(static_cast<int64_t>(text.size() / 4));
  return context.MakeString(convert(text));
}

bool IsMethod(const Value& object, std::string_view name) {
  if (object.is_string()) return StringMethods().contains(name);
  return object.is_dict() &&
         (name == "get" || name == "keys" || name == "values" || name == "items" || name == "copy");
}

Value CallMethod(Context& context, const Value& object, std::string_view method,
                 const Arguments& arguments) {
  context.Step();
  if (object.is_string()) {
    const auto found = StringMethods().find(method);
    if (found != StringMethods().end()) {
      context.Read(object);
      return found->second(context, object.AsString(), arguments);
    }
  } else if (object.is_dict()) {
    if (IsMethod(object, method)) {
      return DictMethod(context, object, method, arguments);
    }
    const Value* member = context.Find(object, Value::String(std::string(method)));
    if (member != nullptr && member->is_callable()) return member->AsCallable()(context, arguments);
  } else if (object.is_undefined()) {
    context.Fail("'", object.UndefinedName(), "' is undefined");
  }
  context.Fail("'", object.TypeName(), "' has no method '", method, "' that a template may call");
}

}  // namespace treadle::jinja
