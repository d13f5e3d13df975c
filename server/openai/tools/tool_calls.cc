#include "server/openai/tools/tool_calls.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "server/openai/json/json_text.h"

namespace treadle {
namespace {

// A format that has the signs of another one comes first.
constexpr ToolFormat kFormats[] = {
    {.name = "Qwen3-Coder's",
     .signs = {"<function=", "<parameter="},
     .open = "<function=",
     .anywhere = true,
     .close = "</tool_call>",
     .read = QwenCoderCalls,
     .end = "</function>",
     .lead = "<tool_call>"},
    {.name = "GLM 4.5's",
     .signs = {"<arg_key>", "<arg_value>"},
     .open = "<tool_call>",
     .anywhere = true,
     .close = "</tool_call>",
     .read = GlmCalls,
     .end = "</tool_call>"},
    {.name = "DeepSeek V3's",
     .signs = {"<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"},
     .open = "<｜tool▁call▁begin｜>",
     .anywhere = true,
     .close = "<｜tool▁calls▁end｜>",
     .read = DeepSeekCalls,
     .end = "<｜tool▁call▁end｜>",
     .lead = "<｜tool▁calls▁begin｜>"},
    {.name = "Kimi K2's",
     .signs = {"<|tool_call_begin|>", "<|tool_call_argument_begin|>"},
     .open = "<|tool_call_begin|>",
     .anywhere = true,
     .close = "<|tool_calls_section_end|>",
     .read = KimiCalls,
     .end = "<|tool_call_end|>",
     .lead = "<|tool_calls_section_begin|>"},
    {.name = "LFM2.5's",
     .signs = {"<|tool_call_start|>", "<|tool_call_end|>"},
     .open = "<|tool_call_start|>",
     .anywhere = true,
     .close = "<|im_end|>",
     .read = LfmCalls,
     .end = "<|tool_call_end|>"},
    {.name = "Mistral's",
     .signs = {"[TOOL_CALLS]", ""},
     .open = "[TOOL_CALLS]",
     .anywhere = true,
     .close = "</s>",
     .read = MistralCalls,
     .find_end = MistralEnd,
     .short_ids = true},
    {.name = "Gemma 4's",
     .signs = {"<|tool_call>", "call:"},
     .open = "<|tool_call>",
     .anywhere = true,
     .close = "<|tool_response>",
     .read = GemmaCalls,
     .end = "<tool_call|>"},
    {.name = "FunctionGemma's",
     .signs = {"<start_function_call>", "call:"},
     .open = "<start_function_call>",
     .anywhere = true,
     .close = "<start_function_response>",
     .read = GemmaCalls,
     .end = "<end_function_call>"},
    {.name = "gpt-oss'", .signs = {"<|channel|>", "functions."}, .open = ""},
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
};

constexpr std::string_view kSpace = " \t\r\n";

}  // namespace

const ToolFormat& GenericToolFormat() {
  return *std::ranges::find(kFormats, "Hermes' and Qwen's", &ToolFormat::name);
}

const ToolFormat& ToolFormat::Held() const {
  return arguments.empty() ? GenericToolFormat() : *this;
}

std::string ToolFormat::CallId(std::string_view answer, int64_t n) const {
  std::string id = Str("call_", answer, "_", n);
  if (!short_ids) return id;
  constexpr std::string_view kDigits = "0123456789abcdefghijklmnopqrstuvwxyz";
  uint64_t sum = 0xcbf29ce484222325;  // FNV-1a, of 64 bits
  for (const char c : id) sum = (sum ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  id.clear();
  for (; id.size() < 9; sum /= kDigits.size()) id += kDigits[sum % kDigits.size()];
  return id;
}

std::string ToolFormat::Begin(std::string_view function) const {
  return Str(anywhere ? open : "", before, R"({"name": )", JsonString(function), R"(, ")",
             arguments, R"(": )");
}

std::string ToolFormat::End() const { return Str("}", after); }

const ToolFormat* FindToolFormat(std::string_view chat_template) {
  for (const ToolFormat& format : kFormats) {
    const auto has = [&](std::string_view sign) { return chat_template.find(sign) != sign.npos; };
    if (std::ranges::all_of(format.signs, has)) return &format;
  }
  return nullptr;
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
  if (format_->read != nullptr) return ReadBlock(out);
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
    auto call = CallInJson(std::string_view(held_).substr(object_, end - object_), marked_);
    return Settle(end, call ? Calls({*std::move(call)}) : std::nullopt, out);
  }
  return false;
}

// As ReadObject, of a syntax of its own.
bool ToolCallReader::ReadBlock(ToolText& out) {
  const std::string_view text = std::string_view(held_).substr(object_);
  size_t end = text.npos;
  if (format_->find_end == nullptr) {
    const size_t seen = at_ - object_;  // where the mark does not begin
    end = text.find(format_->end, seen);
    at_ += text.size() - seen - std::min(text.size() - seen, format_->end.size() - 1);
  } else if (held_.find_first_of("}]", at_) != held_.npos) {
    end = format_->find_end(text);
    at_ = held_.size();
  }
  if (end == text.npos) return false;
  return Settle(object_ + end + format_->end.size(), format_->read(text.substr(0, end), texts_),
                out);
}

// Tells what is held up to there, as calls or text.
bool ToolCallReader::Settle(size_t end, Calls calls, ToolText& out) {
  fresh_ = after_call_ = calls.has_value();
  if (!calls) out.content += held_.substr(0, end);
  for (size_t i = 0; calls && i < calls->size() && (parallel_ || calls_ == 0); ++i) {
    ++calls_;
    out.calls.push_back(std::move((*calls)[i]));
  }
  held_.erase(0, end);
  in_object_ = false;
  return true;
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
  std::string_view rest = std::string_view(held_).substr(at);
  const std::string_view lead = format_->lead;
  if (!lead.empty() && rest.size() < lead.size() && lead.starts_with(rest)) return Opens::kMaybe;
  if (!lead.empty() && rest.starts_with(lead)) {
    rest.remove_prefix(std::min(rest.find_first_not_of(kSpace, lead.size()), rest.size()));
    at = held_.size() - rest.size();
  }
  const bool open = rest.starts_with(format_->open);
  if (!open && format_->open.starts_with(rest)) return Opens::kMaybe;
  if (!open && format_->anywhere) return Opens::kNo;
  if (format_->read != nullptr) {
    object_ = at + format_->open.size();
    return Opens::kYes;
  }
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
