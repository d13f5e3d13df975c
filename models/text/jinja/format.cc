#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "models/text/jinja/library.h"
#include "models/text/unicode.h"

namespace treadle::jinja {
namespace {

// The shortest digits that read back as the same number, laid out as Python's repr does: with an
// exponent below 1e-4 and from 1e16 on.
std::string FloatText(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  auto end = std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  const std::string scientific(buffer, end.ptr);
  const size_t e = scientific.find('e');
  const int exponent = std::stoi(scientific.substr(e + 1));
  if (exponent < -4 || exponent >= 16) return scientific;
  end = std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::fixed);
  std::string text(buffer, end.ptr);
  if (text.find('.') == std::string::npos) text += ".0";
  return text;
}

class Writer {
 public:
  Writer(Context& context, const JsonStyle* json) : context_(context), json_(json) {}

  std::string Write(const Value& value, int level = 0) {
    context_.Step();
    if (value.is_string()) return json_ ? JsonString(value.AsString()) : Repr(value.AsString());
    if (value.is_list()) return WriteList(value, level);
    if (value.is_dict()) return WriteDict(value.AsDict(), level);
    if (value.is_none()) return json_ ? "null" : "None";
    if (value.is_bool())
      return value.AsBool() ? (json_ ? "true" : "True") : json_ ? "false" : "False";
    if (value.is_int()) return std::to_string(value.AsInt());
    if (value.is_big()) return value.AsBig().digits;
    if (value.is_float()) return FloatText(value.AsDouble());
    if (json_ == nullptr && value.is_undefined()) return "Undefined";
    context_.Fail("a value of type '", value.TypeName(), "' cannot be written",
                  json_ ? " as JSON" : "");
  }

 private:
  std::string Wrap(char open, const std::vector<std::string>& parts, char close, int level) {
    std::string out(1, open);
    const bool lines = json_ != nullptr && json_->indent >= 0 && !parts.empty();
    const auto indent = [&](int at) {
      return "\n" + std::string(static_cast<size_t>(at) * static_cast<size_t>(json_->indent), ' ');
    };
    std::string between = lines ? "," : ", ";
    if (json_ != nullptr && json_->between_items) between = *json_->between_items;
    if (lines) between += indent(level + 1);
    size_t size = (parts.size() + 1) * between.size() + 2;
    for (const std::string& part : parts) size += part.size();
    context_.Charge(size);
    if (lines) out += indent(level + 1);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (i > 0) out += between;
      out += parts[i];
    }
    if (lines) out += indent(level);
    out.push_back(close);
    return out;
  }

  std::string WriteList(const Value& value, int level) {
    const std::string& form = value.ListForm();
    const bool tuple = form == "tuple";
    if (json_ != nullptr && !form.empty() && !tuple) {
      context_.Fail("a value of type '", value.TypeName(), "' cannot be written as JSON");
    }
    if (form.starts_with("range(")) return form;
    std::vector<std::string> parts;
    for (const Value& item : value.AsList()) parts.push_back(Write(item, level + 1));
    if (json_ != nullptr || form.empty()) return Wrap('[', parts, ']', level);
    if (!tuple) return Str(form, "(", Wrap('[', parts, ']', level), ")");
    if (parts.size() == 1) parts[0] += ",";
    return Wrap('(', parts, ')', level);
  }

  // JSON has texts alone for keys.
  std::string WriteKey(const Value& key) {
    if (json_ == nullptr || key.is_string()) return Write(key);
    return JsonString(Write(key));
  }

  std::string WriteDict(const Dict& dict, int level) {
    std::vector<const Dict::value_type*> items;
    for (const auto& item : dict) items.push_back(&item);
    if (json_ != nullptr && json_->sort_keys) {
      std::ranges::stable_sort(items, [this](const auto* a, const auto* b) {
        return context_.Order(a->first, b->first) < 0;
      });
    }
    std::vector<std::string> parts;
    const std::string behind_key = json_ == nullptr ? ": " : json_->behind_key;
    for (const auto* item : items) {
      parts.push_back(WriteKey(item->first) + behind_key + Write(item->second, level + 1));
    }
    return Wrap('{', parts, '}', level);
  }

  std::string JsonString(std::string_view text) {
    context_.Charge(text.size());
    return nlohmann::json(text).dump(-1, ' ', json_->ascii_only);
  }

  // Python's repr of a string.
  std::string Repr(std::string_view text) {
    context_.Charge(text.size());
    const bool single = text.find('\'') == text.npos || text.find('"') != text.npos;
    const char quote = single ? '\'' : '"';
    std::string out(1, quote);
    for (size_t at = 0; at < text.size();) {
      const Utf8Front front = ReadUtf8(text.substr(at));
      const char32_t c = front.character;
      if (c == static_cast<char32_t>(quote) || c == '\\') {
        out.push_back('\\');
        out.push_back(static_cast<char>(c));
      } else if (c == '\n' || c == '\r' || c == '\t') {
        out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
      } else if (!IsPrintable(c)) {
        const size_t digits = c < 0x100 ? 2 : c < 0x10000 ? 4 : 8;
        char hex[16];
        std::snprintf(hex, sizeof(hex), "%0*x", static_cast<int>(digits), static_cast<unsigned>(c));
        context_.Charge(digits);
        (out += digits == 2 ? "\\x" : digits == 4 ? "\\u" : "\\U") += hex;
      } else {
        out += text.substr(at, front.length);
      }
      at += front.length;
    }
    out.push_back(quote);
    return out;
  }

  Context& context_;
  const JsonStyle* json_;  // null: Python's repr
};

}  // namespace

std::string Text(Context& context, const Value& value) {
  if (value.is_string()) return value.AsString();
  if (value.is_undefined()) return "";
  return Writer(context, nullptr).Write(value);
}

std::string ToJson(Context& context, const Value& value, const JsonStyle& style) {
  return Writer(context, &style).Write(value);
}

}  // namespace treadle::jinja
