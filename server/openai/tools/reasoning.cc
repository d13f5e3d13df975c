#include "server/openai/tools/reasoning.h"

#include <algorithm>
#include <utility>

#include "base/json_file.h"

namespace treadle {
namespace {

using Kind = HeldText::Kind;

constexpr ReasoningFormat kFormats[] = {
    {.name = "gpt-oss' channels", .sign = "<|channel|>analysis", .open = "", .close = ""},
    {.name = "Gemma 4",
     .sign = "<|channel>",
     .open = "<|channel>",
     .close = "<channel|>",
     .label = "thought\n"},
    {.name = "Magistral", .sign = "[/THINK]", .open = "[THINK]", .close = "[/THINK]"},
    {.name = "Seed-OSS", .sign = "</seed:think>", .open = "<seed:think>", .close = "</seed:think>"},
    {.name = "Qwen 3, QwQ, DeepSeek R1 and V3.1, GLM 4.5 and many others",
     .sign = "</think>",
     .open = "<think>",
     .close = "</think>"},
};

constexpr std::string_view kSpace = " \t\r\n";

// Marks of the harmony format.
constexpr std::string_view kStart = "<|start|>", kChannel = "<|channel|>", kMessage = "<|message|>",
                           kTo = " to=";
constexpr std::string_view kHeads[] = {kStart, kChannel, kTo};  // any may begin a header
constexpr std::string_view kEnds[] = {"<|end|>", "<|call|>", "<|return|>", kStart, kChannel};

size_t Leading(std::string_view text) {
  return std::min(text.find_first_not_of(kSpace), text.size());
}
// Without white space at its end.
size_t Trimmed(std::string_view text) { return text.find_last_not_of(kSpace) + 1; }

// Length of the longest end of `text` that begins `mark` without being all of it.
size_t Overlap(std::string_view text, std::string_view mark) {
  size_t length = std::min(text.size(), mark.size() - 1);
  while (!text.ends_with(mark.substr(0, length))) --length;
  return length;
}

// The word that follows `mark` in a header.
std::string_view WordBehind(std::string_view header, std::string_view mark) {
  const size_t at = header.find(mark);
  if (at == header.npos) return {};
  const std::string_view rest = header.substr(at + mark.size());
  return rest.substr(0, rest.find_first_of(" <\t\r\n"));
}

}  // namespace

const ReasoningFormat* FindReasoningFormat(std::string_view chat_template) {
  for (const ReasoningFormat& format : kFormats) {
    if (chat_template.find(format.sign) != chat_template.npos) return &format;
  }
  return nullptr;
}

OpenedReasoning ReasoningOpenedBy(std::string_view answer) {
  const std::string_view text = answer.substr(Leading(answer));
  OpenedReasoning opened;
  for (const ReasoningFormat& format : kFormats) {
    if (format.harmony()) continue;
    if (text.starts_with(format.open)) return {.format = &format};
    opened.undecided |= format.open.starts_with(text);
  }
  return opened;
}

Thinking ThinkingAfter(std::string_view prompt, const ReasoningFormat& format,
                       std::string_view chat_template) {
  if (format.harmony()) return Thinking::kMaybe;
  const std::string_view end = prompt.substr(0, Trimmed(prompt));
  const std::string_view label = format.label.substr(0, Trimmed(format.label));
  if (end.ends_with(format.close)) return Thinking::kOver;
  if (end.substr(0, end.size() - (end.ends_with(label) ? label.size() : 0))
          .ends_with(format.open)) {
    return Thinking::kBegun;
  }
  // A template that only ever removes what was thought is of models that always think, some of
  // which leave out the first mark.
  return chat_template.find(format.open) == chat_template.npos ? Thinking::kBegun
                                                               : Thinking::kMaybe;
}

Thinking ThinkingOfChats(const GenerateRequest& request, const ReasoningFormat& format,
                         const ServedModel& model) {
  const auto prompt = RenderChat({{"user", "a"}}, request, model);
  if (!prompt.ok()) return Thinking::kMaybe;
  return ThinkingAfter(*prompt, format, model.chat_template->source());
}

bool ClosesByControlToken(const ReasoningFormat& format, const ServedModel& model) {
  return std::ranges::any_of(model.tokenizer->spec().tokens, [&](const auto& token) {
    return token.kind == TokenKind::kControl && token.text == format.close;
  });
}

Thinking ThinkingWithin(std::string_view text, const ReasoningFormat& format) {
  const size_t open = format.harmony() ? text.npos : text.rfind(format.open);
  const bool begun = open != text.npos && text.find(format.close, open) == text.npos;
  return begun ? Thinking::kBegun : Thinking::kOver;
}

std::string HeldText::Take(size_t bytes, Kind kind) {
  settled_ += bytes;
  for (; !begins_.empty() && begins_.front() < settled_; begins_.pop_front()) {
    reasoning_tokens_ += kind == Kind::kReasoning;
  }
  std::string taken = text_.substr(0, bytes);
  text_.erase(0, bytes);
  return taken;
}

AnswerReader::AnswerReader(const Options& options) : options_(options) {
  const bool harmony = options_.reasoning != nullptr && options_.reasoning->harmony();
  if (options_.reasoning != nullptr && !harmony && options_.thinking != Thinking::kOver) {
    state_ = State::kBefore;
  }
  if (options_.tools != nullptr && !(harmony && options_.tools->harmony())) {
    calls_.emplace(*options_.tools, options_.parallel, options_.texts);
  }
}

AnswerText AnswerReader::Push(std::string_view text) { return Read(text, false); }

AnswerText AnswerReader::Finish() {
  AnswerText out = Read("", true);
  if (!calls_) return out;
  ToolText rest = calls_->Finish();
  out.content += rest.content;
  std::ranges::move(rest.calls, std::back_inserter(out.calls));
  return out;
}

AnswerText AnswerReader::Read(std::string_view text, bool end) {
  held_.Add(text);
  AnswerText out;
  const bool harmony = options_.reasoning != nullptr && options_.reasoning->harmony();
  while (harmony ? StepHarmony(out, end) : StepMarks(out, end)) {
  }
  return out;
}

// Settles text that is reasoning, or said: there it may be a call.
void AnswerReader::Tell(size_t bytes, Kind kind, AnswerText& out) {
  const std::string text = held_.Take(bytes, kind);
  if (kind == Kind::kReasoning) {
    out.reasoning += text;
  } else {
    Say(text, out);
  }
}

void AnswerReader::Say(std::string_view text, AnswerText& out) {
  if (!calls_) {
    out.content += text;
    return;
  }
  ToolText read = calls_->Push(text);
  out.content += read.content;
  std::ranges::move(read.calls, std::back_inserter(out.calls));
}

// -- marks around what is thought -----------------------------------------------------------------

bool AnswerReader::StepMarks(AnswerText& out, bool end) {
  const std::string_view text = held_.text();
  const size_t space = Leading(text);
  const std::string_view rest = text.substr(space);
  switch (state_) {
    case State::kBefore: {
      const std::string_view open = options_.reasoning->open;
      if (rest.starts_with(open)) {
        held_.Take(space + open.size(), Kind::kMark);
        state_ = State::kLabel;
      } else if (!end && open.starts_with(rest)) {
        return false;
      } else {
        state_ = options_.thinking == Thinking::kBegun ? State::kLabel : State::kSaid;
      }
      return true;
    }
    case State::kLabel: {
      const std::string_view label = options_.reasoning->label;
      if (!end && text.size() < label.size() && label.starts_with(text)) return false;
      if (text.starts_with(label)) held_.Take(label.size(), Kind::kMark);
      state_ = State::kSpace;
      return true;
    }
    case State::kSpace:
    case State::kAfter:
      held_.Take(space, Kind::kMark);
      if (rest.empty()) return false;
      state_ = state_ == State::kSpace ? State::kInside : State::kSaid;
      return true;
    case State::kInside: {
      const std::string_view close = options_.reasoning->close;
      const size_t at = text.find(close);
      const bool found = at != text.npos;
      const size_t settled = found ? at : text.size() - (end ? 0 : Overlap(text, close));
      const size_t told = Trimmed(text.substr(0, settled));
      Tell(told, Kind::kReasoning, out);
      if (!found) {
        if (end) held_.Take(settled - told, Kind::kMark);
        return false;
      }
      held_.Take(at - told + close.size(), Kind::kMark);
      state_ = State::kAfter;
      return true;
    }
    case State::kSaid:
      Tell(text.size(), Kind::kContent, out);
      return false;
  }
  return false;
}

// -- harmony --------------------------------------------------------------------------------------

// From https://github.com/openai/harmony/blob/main/docs/format.md. The prompt ends with the first
// message's role. An answer that is held to a form has no header: it is said.
bool AnswerReader::StepHarmony(AnswerText& out, bool end) {
  if (in_message_) return TellMessage(out, end);
  const std::string_view text = held_.text();
  if (text.empty()) return false;
  const auto begins = [&](std::string_view mark) { return text.starts_with(mark); };
  const auto may_begin = [&](std::string_view mark) { return mark.starts_with(text); };
  if (std::ranges::any_of(kHeads, begins)) {
    if (BeginMessage()) return true;
    if (end) held_.Take(text.size(), Kind::kMark);
    return false;
  }
  if (!end && std::ranges::any_of(kHeads, may_begin)) return false;
  if (!fresh_) {  // what stands between two messages
    size_t next = text.npos, keep = 0;
    for (const std::string_view head : kHeads) {
      next = std::min(next, text.find(head));
      keep = std::max(keep, Overlap(text, head));
    }
    held_.Take(std::min(next, text.size() - (end ? 0 : keep)), Kind::kMark);
    return next != text.npos;
  }
  function_.clear();
  kind_ = Kind::kContent;
  in_message_ = true;
  return true;
}

// A header becomes the state of its message. False: there is more of it to come.
bool AnswerReader::BeginMessage() {
  const std::string_view text = held_.text();
  const size_t at = text.find(kMessage);
  if (at == text.npos) return false;
  const std::string_view header = text.substr(0, at);
  std::string_view to = WordBehind(header, kTo);
  kind_ = WordBehind(header, kChannel) == "analysis" ? Kind::kReasoning : Kind::kContent;
  function_.clear();
  header_ = 0;
  constexpr std::string_view kFunctions = "functions.";
  if (to.starts_with(kFunctions) && options_.tools != nullptr && options_.tools->harmony()) {
    function_ = to.substr(kFunctions.size());
    // A call that is none is told without the role.
    const size_t role = std::min(header.find(kChannel), header.find(kTo));
    header_ = at + kMessage.size() - role;
    held_.Take(role, Kind::kMark);
  } else {
    held_.Take(at + kMessage.size(), Kind::kMark);
  }
  fresh_ = false;
  in_message_ = true;
  bool& before = kind_ == Kind::kReasoning ? thought_ : spoken_;
  separate_ = std::exchange(before, true) && function_.empty();
  return true;
}

bool AnswerReader::TellMessage(AnswerText& out, bool end) {
  const std::string_view text = held_.text();
  size_t at = text.npos, mark = 0, keep = 0;
  for (const std::string_view ends : kEnds) {
    if (const size_t found = text.find(ends, header_); found < at) {
      at = found;
      mark = ends == kStart || ends == kChannel ? 0 : ends.size();
    }
    keep = std::max(keep, Overlap(text, ends));
  }
  const bool ended = end || at != text.npos;
  if (!function_.empty()) {
    if (!ended) return false;
    const size_t stop = std::min(at, text.size());
    const auto arguments = WithKeysOnce(text.substr(header_, stop - header_));
    if (!arguments.ok()) {
      Tell(stop, Kind::kContent, out);
    } else {
      if (options_.parallel || !called_) out.calls.push_back({"", function_, *arguments});
      called_ = true;
      held_.Take(stop, Kind::kMark);
    }
  } else {
    const size_t stop = ended ? std::min(at, text.size()) : text.size() - keep;
    if (stop > 0 && std::exchange(separate_, false)) {
      (kind_ == Kind::kReasoning ? out.reasoning : out.content) += '\n';
    }
    Tell(stop, kind_, out);
    if (!ended) return false;
  }
  held_.Take(at == text.npos ? 0 : mark, Kind::kMark);
  header_ = 0;
  in_message_ = false;
  fresh_ = false;
  return !held_.text().empty();
}

}  // namespace treadle
