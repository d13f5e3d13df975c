// Taking an answer apart: what a model thinks, what it says, and which tools it calls.
//
// A ReasoningFormat is constant; an AnswerReader is not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/openai/tools/tool_calls.h"
#include "server/session/request_validation.h"

namespace treadle {

// How a model marks what it thinks. Its chat template shows which way is the model's.
struct ReasoningFormat {
  std::string_view name;         // for pages
  std::string_view sign;         // a template of this format has it
  std::string_view open, close;  // stand around what is thought; empty: the harmony format
  std::string_view label = {};   // may follow `open`; it is no text

  // gpt-oss writes messages, each in a channel: <|channel|>NAME<|message|>TEXT<|end|>
  bool harmony() const { return open.empty(); }
};

// Null if the template has the sign of none.
const ReasoningFormat* FindReasoningFormat(std::string_view chat_template);

// For who has an answer and not the template: the format whose first mark the answer begins with.
struct OpenedReasoning {
  const ReasoningFormat* format = nullptr;
  bool undecided = false;  // more text may make it one
};
OpenedReasoning ReasoningOpenedBy(std::string_view answer);

// Whether the answer to a prompt begins within what is thought.
enum class Thinking : uint8_t {
  kMaybe,  // if its first mark says so
  kBegun,  // the prompt has opened it, or models of this template always think
  kOver,   // the prompt has closed it
};
Thinking ThinkingAfter(std::string_view prompt, const ReasoningFormat& format,
                       std::string_view chat_template);

// The same of chats as `request` asks for them: the end of a prompt does not depend on what is
// said.
Thinking ThinkingOfChats(const GenerateRequest& request, const ReasoningFormat& format,
                         const ServedModel& model);
// Whether the last mark is a control token of the model, which a text may be without.
bool ClosesByControlToken(const ReasoningFormat& format, const ServedModel& model);

// The same of an answer that goes on with `text`: what is open there goes on.
Thinking ThinkingWithin(std::string_view text, const ReasoningFormat& format);

// Parts of an answer that became settled.
struct AnswerText {
  std::string reasoning;
  std::string content;
  std::vector<ToolCall> calls;  // without ids
};

// Text of an answer that is not settled yet, and how many tokens of it were reasoning: a token is
// what its first byte is. Marks are neither reasoning nor content.
class HeldText {
 public:
  enum class Kind : uint8_t { kMark, kReasoning, kContent };

  // The text that comes next is the next token's.
  void BeginToken() { begins_.push_back(settled_ + text_.size()); }
  void Add(std::string_view text) { text_ += text; }
  std::string_view text() const { return text_; }
  // Removes so many bytes, and gives them.
  std::string Take(size_t bytes, Kind kind);
  int64_t reasoning_tokens() const { return reasoning_tokens_; }

 private:
  std::string text_;
  size_t settled_ = 0;
  std::deque<size_t> begins_;  // of tokens that are not settled
  int64_t reasoning_tokens_ = 0;
};

// Separates an answer that arrives in pieces; where the pieces' borders are makes no difference.
// White space around what is thought is not told. In the harmony format, analysis is reasoning, a
// message to a function is a call (if tools were offered), and all else is said.
class AnswerReader {
 public:
  struct Options {
    const ReasoningFormat* reasoning = nullptr;  // null: all of it is said
    Thinking thinking = Thinking::kMaybe;
    const ToolFormat* tools = nullptr;  // null: no calls are looked for
    bool parallel = true;               // else only the first call is told
    TextParameters texts = {};
  };
  explicit AnswerReader(const Options& options);

  void BeginToken() { held_.BeginToken(); }
  AnswerText Push(std::string_view text);
  // Gives what was held back; the answer has ended.
  AnswerText Finish();
  int64_t reasoning_tokens() const { return held_.reasoning_tokens(); }

 private:
  // Each true: something was settled, there may be more. `end`: nothing follows.
  bool StepMarks(AnswerText& out, bool end);
  bool StepHarmony(AnswerText& out, bool end);
  bool TellMessage(AnswerText& out, bool end);
  bool BeginMessage();
  void Tell(size_t bytes, HeldText::Kind kind, AnswerText& out);
  AnswerText Read(std::string_view text, bool end);
  void Say(std::string_view text, AnswerText& out);

  enum class State : uint8_t { kBefore, kLabel, kSpace, kInside, kAfter, kSaid };

  Options options_;
  HeldText held_;
  State state_ = State::kSaid;
  std::optional<ToolCallReader> calls_;  // of what is said

  // The message that is being read, in the harmony format.
  bool in_message_ = false, fresh_ = true;
  std::string function_;  // that it calls; empty: none
  HeldText::Kind kind_ = HeldText::Kind::kContent;
  size_t header_ = 0;                      // bytes of a call's header in held_
  bool thought_ = false, spoken_ = false;  // a message of this kind was read
  bool separate_ = false;                  // a line end comes before this one's text
  bool called_ = false;
};

}  // namespace treadle
