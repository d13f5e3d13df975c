#include "server/openai/tools/call_syntax.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/json_file.h"
#include "base/status.h"
#include "server/openai/json/json_text.h"

namespace treadle {
namespace {

constexpr std::string_view kSpace = " \t\r\n";
constexpr int kMaxDepth = 64;  // as ParseJsonObject's

std::string_view Trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == text.npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

// Takes what comes before `mark`, and the mark; nothing if it is not there.
std::optional<std::string_view> TakeUntil(std::string_view mark, std::string_view& text) {
  const size_t at = text.find(mark);
  if (at == text.npos) return std::nullopt;
  const std::string_view before = text.substr(0, at);
  text.remove_prefix(at + mark.size());
  return before;
}
bool Take(std::string_view mark, std::string_view& text) {
  const bool there = text.starts_with(mark);
  if (there) text.remove_prefix(mark.size());
  return there;
}
void SkipSpace(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
}

Calls One(std::string_view name, std::string arguments) {
  name = Trimmed(name);
  const auto whole = WithKeysOnce(Trimmed(arguments));
  if (name.empty() || !whole.ok()) return std::nullopt;
  return std::vector<ToolCall>{{"", std::string(name), *whole}};
}

// One value.
bool IsJson(std::string_view text) {
  const auto object = ParseJsonObject(Str("{\"a\":", text, "}"), "");
  return object.ok() && object->size() == 1;
}

// The members of an object whose values a model writes without quotes.
class Members {
 public:
  Members(std::string_view function, const TextParameters& texts) {
    const auto found = texts.find(Trimmed(function));
    if (found != texts.end()) texts_ = &found->second;
  }
  // JSON, unless the parameter is a text, or the value no JSON.
  void Add(std::string_view key, std::string_view value) {
    key = Trimmed(key);
    std::string json(Trimmed(value));
    const bool text = texts_ != nullptr && texts_->contains(std::string(key));
    if (text || !IsJson(json)) json = JsonString(value);
    object_ += Str(object_.empty() ? "" : ", ", JsonString(key), ": ", json);
  }
  std::string Object() const { return Str("{", object_, "}"); }

 private:
  const std::set<std::string>* texts_ = nullptr;
  std::string object_;
};

// -- values that are no JSON ----------------------------------------------------------------------

// How a model writes a text with marks around it, and what ends a value without; values become
// JSON.
struct ValueSyntax {
  std::optional<std::string> (*quoted)(std::string_view& text);
  std::string_view ends;
  // Names of values that JSON calls otherwise.
  std::span<const std::pair<std::string_view, std::string_view>> names = {};
};

// Marks around texts, of Gemma 4 and of FunctionGemma.
constexpr std::string_view kQuotes[] = {"<|\"|>", "<escape>"};

std::optional<std::string> TakeGemmaText(std::string_view& text) {
  for (const std::string_view quote : kQuotes) {
    if (!Take(quote, text)) continue;
    const auto quoted = TakeUntil(quote, text);
    return quoted ? std::optional(JsonString(*quoted)) : std::nullopt;
  }
  return std::nullopt;
}

// A text in quotes of either kind.
std::optional<std::string> TakePythonText(std::string_view& text) {
  const char quote = text.empty() ? 0 : text.front();
  if (quote != '\'' && quote != '"') return std::nullopt;
  std::string value;
  for (size_t at = 1; at < text.size(); ++at) {
    if (text[at] == quote) {
      const size_t next = text.find_first_not_of(kSpace, at + 1);
      if (next == text.npos || std::string_view(",)]}:").find(text[next]) != text.npos) {
        text.remove_prefix(at + 1);
        return JsonString(value);
      }
    }
    const char escaped = text[at] == '\\' && at + 1 < text.size() ? text[at + 1] : 0;
    const size_t known = std::string_view("nt\\'\"").find(escaped);
    const bool escapes = escaped != 0 && known != std::string_view::npos;
    value += escapes ? "\n\t\\'\""[known] : text[at];
    at += escapes ? 1 : 0;
  }
  return std::nullopt;
}

constexpr ValueSyntax kGemma = {TakeGemmaText, ",}]"};
constexpr std::pair<std::string_view, std::string_view> kPythonNames[] = {
    {"True", "true"}, {"False", "false"}, {"None", "null"}};
constexpr ValueSyntax kPython = {TakePythonText, ",)}]", kPythonNames};

std::optional<std::string> TakeValue(const ValueSyntax& syntax, std::string_view& text, int depth) {
  SkipSpace(text);
  const bool object = Take("{", text), array = !object && Take("[", text);
  if (!object && !array) {
    if (auto quoted = syntax.quoted(text)) return quoted;
    const size_t end = std::min(text.find_first_of(syntax.ends), text.size());
    const std::string bare(Trimmed(text.substr(0, end)));
    if (bare.empty() || bare.starts_with("<")) return std::nullopt;
    text.remove_prefix(end);
    for (const auto& [name, json] : syntax.names) {
      if (bare == name) return std::string(json);
    }
    return IsJson(bare) ? bare : JsonString(bare);
  }
  if (depth == kMaxDepth) return std::nullopt;
  const std::string_view close = object ? "}" : "]";
  std::string json(object ? "{" : "[");
  for (bool first = true;; first = false) {
    SkipSpace(text);
    if (Take(close, text)) return json += close;
    if (!first && !Take(",", text)) return std::nullopt;
    if (!first) json += ", ";
    SkipSpace(text);
    if (object) {
      std::optional<std::string> key = syntax.quoted(text);
      const auto rest = TakeUntil(":", text);
      if (!rest) return std::nullopt;
      json += (key ? *key : JsonString(Trimmed(*rest))) + ": ";
    }
    const auto value = TakeValue(syntax, text, depth + 1);
    if (!value) return std::nullopt;
    json += *value;
  }
}

}  // namespace

std::optional<ToolCall> CallInJson(std::string_view text, bool marked) {
  const auto once = WithKeysOnce(text);
  if (!once.ok()) return std::nullopt;
  const auto object = ParseJsonObject(*once, "");
  const auto name = object->find("name");
  if (name == object->end() || !name->is_string()) return std::nullopt;
  ToolCall call{.id = "", .name = name->get<std::string>(), .arguments = "{}"};
  for (const char* key : {"arguments", "parameters"}) {
    const auto arguments = object->find(key);
    if (arguments == object->end()) continue;
    if (arguments->is_object()) {
      call.arguments = MemberText(*once, key);
    } else if (arguments->is_string()) {
      const auto written = arguments->get<std::string>();
      if (written.find_first_not_of(kSpace) == written.npos) return call;
      auto read = WithKeysOnce(written);
      if (!read.ok()) return std::nullopt;
      call.arguments = *std::move(read);
    } else if (!arguments->is_null()) {
      return std::nullopt;
    }
    return call;
  }
  return marked && object->size() == 1 ? std::optional(call) : std::nullopt;
}

size_t JsonEnd(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t at = std::min(text.find_first_of("{["), text.size()); at < text.size(); ++at) {
    const char c = text[at];
    if (in_string) {
      if (c == '\\') ++at;
      in_string = c != '"';
      continue;
    }
    in_string = c == '"';
    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    if (depth <= 0) return at + 1;
  }
  return text.npos;
}

// -- Mistral --------------------------------------------------------------------------------------

namespace {

constexpr std::string_view kArguments = "[ARGS]", kCallId = "[CALL_ID]";

// The first sign of an array; one of the marks begins so, too, but behind a name.
bool IsArray(std::string_view text) {
  SkipSpace(text);
  return text.starts_with("[");
}

}  // namespace

size_t MistralEnd(std::string_view text) {
  const size_t begin = IsArray(text) ? 0 : text.find('{');
  if (begin == text.npos) return text.npos;
  const size_t length = JsonEnd(text.substr(begin));
  return length == text.npos ? length : begin + length;
}

Calls MistralCalls(std::string_view text, const TextParameters&) {
  if (!IsArray(text)) {
    const size_t brace = text.find('{');
    if (brace == text.npos) return std::nullopt;
    std::string_view name = text.substr(0, brace);
    for (const std::string_view mark : {kArguments, kCallId})
      name = name.substr(0, name.find(mark));
    return One(name, std::string(text.substr(brace)));
  }
  std::vector<ToolCall> calls;
  text = Trimmed(text);
  text.remove_prefix(1);
  while (true) {
    SkipSpace(text);
    if (Take("]", text)) break;
    if (!calls.empty() && !Take(",", text)) return std::nullopt;
    const size_t end = JsonEnd(text);
    if (end == text.npos) return std::nullopt;
    auto call = CallInJson(text.substr(0, end), /*marked=*/true);
    if (!call) return std::nullopt;
    calls.push_back(*std::move(call));
    text.remove_prefix(end);
  }
  return calls.empty() ? std::nullopt : Calls(std::move(calls));
}

// -- values without quotes ------------------------------------------------------------------------

Calls QwenCoderCalls(std::string_view text, const TextParameters& texts) {
  const auto name = TakeUntil(">", text);
  if (!name) return std::nullopt;
  Members members(*name, texts);
  for (SkipSpace(text); !text.empty(); SkipSpace(text)) {
    if (!Take("<parameter=", text)) return std::nullopt;
    const auto key = TakeUntil(">", text);
    auto value = key ? TakeUntil("</parameter>", text) : std::nullopt;
    if (!value) return std::nullopt;
    Take("\n", *value);
    if (value->ends_with('\n')) value->remove_suffix(1);
    members.Add(*key, *value);
  }
  return One(*name, members.Object());
}

Calls GlmCalls(std::string_view text, const TextParameters& texts) {
  const size_t end = std::min(text.find_first_of("\n<"), text.size());
  const std::string_view name = text.substr(0, end);
  text.remove_prefix(end);
  Members members(name, texts);
  for (SkipSpace(text); !text.empty(); SkipSpace(text)) {
    if (!Take("<arg_key>", text)) return std::nullopt;
    const auto key = TakeUntil("</arg_key>", text);
    SkipSpace(text);
    const auto value =
        key && Take("<arg_value>", text) ? TakeUntil("</arg_value>", text) : std::nullopt;
    if (!value) return std::nullopt;
    members.Add(*key, *value);
  }
  return One(name, members.Object());
}

// -- others ---------------------------------------------------------------------------------------

Calls DeepSeekCalls(std::string_view text, const TextParameters&) {
  const auto name = TakeUntil("<｜tool▁sep｜>", text);
  if (!name) return std::nullopt;
  constexpr std::string_view kFence = "```";
  const size_t fence = text.find(kFence);
  if (fence == text.npos || text.substr(0, fence).find('{') != text.npos) {
    return One(*name, std::string(text));
  }
  const std::string_view function = text.substr(0, fence);
  text.remove_prefix(fence + kFence.size());
  const auto line = TakeUntil("\n", text);  // "json"
  text = Trimmed(text);
  if (!line || !text.ends_with(kFence)) return std::nullopt;
  text.remove_suffix(kFence.size());
  return One(function, std::string(text));
}

Calls GemmaCalls(std::string_view text, const TextParameters&) {
  SkipSpace(text);
  const size_t brace = text.find('{');
  if (!Take("call:", text) || brace == text.npos) return std::nullopt;
  const std::string_view name = text.substr(0, text.find('{'));
  text.remove_prefix(name.size());
  auto arguments = TakeValue(kGemma, text, 0);
  if (!arguments || !Trimmed(text).empty()) return std::nullopt;
  return One(name, *std::move(arguments));
}

Calls KimiCalls(std::string_view text, const TextParameters&) {
  const auto header = TakeUntil("<|tool_call_argument_begin|>", text);
  if (!header) return std::nullopt;
  const std::string_view id = Trimmed(*header);
  std::string_view name = id.substr(0, id.rfind(':'));
  Take("functions.", name);
  Calls calls = One(name, Trimmed(text).empty() ? "{}" : std::string(text));
  if (calls) calls->front().id = id;
  return calls;
}

Calls LfmCalls(std::string_view text, const TextParameters& texts) {
  text = Trimmed(text);
  const std::string_view whole = text;
  const bool list = Take("[", text);
  SkipSpace(text);
  if (text.starts_with("{")) return MistralCalls(list ? whole : Str("[", whole, "]"), texts);
  std::vector<ToolCall> calls;
  while (calls.empty() || list) {
    SkipSpace(text);
    if (list && Take("]", text)) break;
    if (!calls.empty() && !Take(",", text)) return std::nullopt;
    const auto name = TakeUntil("(", text);
    if (!name || Trimmed(*name).find_first_of(" '\"[]{}=,\n") != name->npos) return std::nullopt;
    std::string arguments;
    for (SkipSpace(text); !Take(")", text); SkipSpace(text)) {
      if (!arguments.empty() && !Take(",", text)) return std::nullopt;
      const auto key = TakeUntil("=", text);
      const auto value = key ? TakeValue(kPython, text, 0) : std::nullopt;
      if (!value) return std::nullopt;
      arguments += Str(arguments.empty() ? "" : ", ", JsonString(Trimmed(*key)), ": ", *value);
    }
    const Calls call = One(*name, Str("{", arguments, "}"));
    if (!call) return std::nullopt;
    calls.push_back(call->front());
  }
  return calls.empty() || !Trimmed(text).empty() ? std::nullopt : Calls(std::move(calls));
}

}  // namespace treadle
