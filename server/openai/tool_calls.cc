#include "server/openai/tool_calls.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/json_file.h"
#include "base/status.h"
#include "server/openai/json_text.h"

namespace treadle {
namespace {

constexpr ToolFormat kFormats[] = {
    {.name = "Hermes' and Qwen's",
     .signs = {"<tool_call>", "\"name\": "},
     .open = "<tool_call>",
     .anywhere = true,
     .close = "</tool_call>",
     .before = "\n",
     .arguments = "arguments",
     .after = "\n</tool_call>",
     .separator = "\n"},
    {.name = "Llama 3's",
     .signs = {"{\"name\": ", "\"parameters\": "},
     .open = "<|python_tag|>",
     .anywhere = false,
     .close = ";",
     .before = "",
     .arguments = "parameters",
     .after = "",
     .separator = "; "},
    {.name = "gpt-oss'", .signs = {"<|channel|>", "functions."}, .open = ""},
};

constexpr std::string_view kSpace = " \t\r\n";

// `text`: from a brace to its counterpart. `marked`: it can be nothing but a call.
std::optional<ToolCall> CallIn(std::string_view text, bool marked) {
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

}  // namespace

std::string ToolFormat::Begin(std::string_view function) const {
  return Str(anywhere ? open : "", before, R"({"name": )", JsonString(function), R"(, ")",
             arguments, R"(": )");
}

const ToolFormat& ToolFormat::Held() const { return arguments.empty() ? kFormats[0] : *this; }

std::string ToolFormat::End() const { return Str("}", after); }

const ToolFormat* FindToolFormat(std::string_view chat_template) {
  for (const ToolFormat& format : kFormats) {
    const auto has = [&](std::string_view sign) { return chat_template.find(sign) != sign.npos; };
    if (std::ranges::all_of(format.signs, has)) return &format;
  }
  return nullptr;
}

std::string ToolFormatNames() {
  std::string names;
  for (const ToolFormat& format : kFormats) {
    if (!names.empty()) names += " and ";
    names += format.name;
  }
  return names;
}

ToolText ToolCallReader::Push(std::string_view text) {
  held_ += text;
  ToolText out;
  while (in_object_ ? ReadObject(out) : ReadText(out)) {
  }
  return out;
}

ToolText ToolCallReader::Finish() { return {std::exchange(held_, std::string()), {}}; }

// True: an object begins. False: all is told that can be.
bool ToolCallReader::ReadText(ToolText& out) {
  if (after_call_ && !SkipClose()) return false;
  size_t at = NextPlace(0);
  while (at != std::string::npos) {
    const Opens opens = OpensAt(at);
    if (opens == Opens::kYes) {
      const size_t told = TellBefore(at, out);
      object_ -= told;
      at_ = object_;
      in_object_ = true;
      return true;
    }
    if (opens == Opens::kMaybe) break;
    at = NextPlace(at + 1);
  }
  TellBefore(std::min(at, held_.size()), out);
  return false;
}

// True: the object has ended. False: there is no more of it yet.
bool ToolCallReader::ReadObject(ToolText& out) {
  for (; at_ < held_.size(); ++at_) {
    const char c = held_[at_];
    if (in_string_) {
      if (c == '\\') ++at_;  // and what it escapes, perhaps in the next piece
      in_string_ = c != '"';
      continue;
    }
    in_string_ = c == '"';
    depth_ += (c == '{' || c == '[') - (c == '}' || c == ']');
    if (depth_ > 0) continue;
    const size_t end = at_ + 1;
    std::optional<ToolCall> call =
        CallIn(std::string_view(held_).substr(object_, end - object_), marked_);
    fresh_ = after_call_ = call.has_value();
    if (!call) {
      out.content += held_.substr(0, end);
    } else if (parallel_ || calls_ == 0) {
      ++calls_;
      out.calls.push_back(*std::move(call));
    }
    held_.erase(0, end);
    in_object_ = false;
    return true;
  }
  return false;
}

// Drops what may stand behind a call. False: more of it may come.
bool ToolCallReader::SkipClose() {
  while (true) {
    held_.erase(0, std::min(held_.find_first_not_of(kSpace), held_.size()));
    if (format_->close.starts_with(held_) && held_ != format_->close) return false;
    if (!held_.starts_with(format_->close)) break;
    held_.erase(0, format_->close.size());
  }
  after_call_ = false;
  return true;
}

// Where, from there on, a call may begin; npos: nowhere.
size_t ToolCallReader::NextPlace(size_t from) const {
  if (format_->anywhere) return held_.find(format_->open.front(), from);
  if (!fresh_ || from > 0) return std::string::npos;
  return std::min(held_.find_first_not_of(kSpace), held_.size());
}

// With kYes, object_ is where its brace is.
ToolCallReader::Opens ToolCallReader::OpensAt(size_t at) {
  const std::string_view rest = std::string_view(held_).substr(at);
  const bool open = rest.starts_with(format_->open);
  if (!open && format_->open.starts_with(rest)) return Opens::kMaybe;
  if (!open && format_->anywhere) return Opens::kNo;
  const size_t brace = rest.find_first_not_of(kSpace, open ? format_->open.size() : 0);
  if (brace == std::string_view::npos) return Opens::kMaybe;
  if (rest[brace] != '{') return Opens::kNo;
  object_ = at + brace;
  marked_ = open;
  return Opens::kYes;
}

// Tells what stands before, but for white space at its end; how many bytes that was.
size_t ToolCallReader::TellBefore(size_t at, ToolText& out) {
  const size_t last = at == 0 ? std::string::npos : held_.find_last_not_of(kSpace, at - 1);
  const size_t count = last == std::string::npos ? 0 : last + 1;
  out.content += held_.substr(0, count);
  held_.erase(0, count);
  if (count > 0) fresh_ = false;
  return count;
}

}  // namespace treadle
