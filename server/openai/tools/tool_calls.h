// Calls of tools in what a model writes, taken out of its text.
//
// A ToolFormat is constant; a ToolCallReader is not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/text/jinja/chat_template.h"
#include "server/openai/tools/call_syntax.h"

namespace treadle {

// How a model writes a call: marks, and between them JSON ({"name": TEXT, "arguments": OBJECT}, or
// with "parameters" for "arguments") or a syntax of its own. Its chat template shows which way is
// the model's. Small models write less JSON: arguments that are null, empty or a JSON text in a
// string, none at all (behind `open`), or a key twice, of which the last counts.
struct ToolFormat {
  std::string_view name;
  std::string_view signs[2];  // a template of this format has both
  std::string_view open;
  bool anywhere;  // a call may follow text, but needs `open`; else it begins the answer, or follows
                  // a call, and `open` may be missing
  std::string_view close;  // may follow a call; it is no text of the answer
  // How the models of this format were taught to write it, behind `open` if that is needed.
  std::string_view before = {}, arguments = {}, after = {}, separator = {};

  // A syntax of its own: the function that reads it, and its end, a mark that is dropped or a
  // function.
  Calls (*read)(std::string_view text, const TextParameters& texts) = nullptr;
  std::string_view end = {};
  size_t (*find_end)(std::string_view text) = nullptr;  // npos: it has not come
  std::string_view lead = {};  // may stand before `open`; it is no text of the answer
  bool short_ids = false;      // its templates take ids of nine letters and digits alone

  // gpt-oss': a call is a message of the harmony format (reasoning.h).
  bool harmony() const { return open.empty(); }
  // The format of calls that an answer is held to: this one, or Hermes' where this is no JSON.
  const ToolFormat& Held() const;
  // The name of an answer's n-th call.
  std::string CallId(std::string_view answer, int64_t n) const;
  // The text before and behind the arguments of a call.
  std::string Begin(std::string_view function) const;
  std::string End() const;
};

// Null if the template has the signs of none.
const ToolFormat* FindToolFormat(std::string_view chat_template);
// Hermes'; the server teaches it to models whose template knows no tools (generic_tools.h).
const ToolFormat& GenericToolFormat();

// The text that became settled.
struct ToolText {
  std::string content;
  std::vector<ToolCall> calls;  // without ids
};

// Separates an answer that arrives in pieces into text and calls; where the pieces' borders are
// makes no difference. A call is told when it is whole. What begins like one and is none (broken
// JSON, no name, other arguments, the answer's end) is text. White space beside a call is not told.
class ToolCallReader {
 public:
  // Unless `parallel`, only the first call is told.
  ToolCallReader(const ToolFormat& format, bool parallel, TextParameters texts = {})
      : format_(&format), parallel_(parallel), texts_(std::move(texts)) {}

  ToolText Push(std::string_view text);
  // The text that was held back; the answer has ended.
  ToolText Finish();
  // Whether a call was told.
  bool called() const { return calls_ > 0; }

 private:
  enum class Opens { kNo, kMaybe, kYes };

  bool ReadText(ToolText& out);
  bool ReadObject(ToolText& out);
  bool ReadBlock(ToolText& out);
  bool Settle(size_t end, Calls calls, ToolText& out);
  bool SkipClose();
  size_t NextPlace(size_t from) const;
  Opens OpensAt(size_t at);
  size_t TellBefore(size_t at, ToolText& out);

  const ToolFormat* format_;
  bool parallel_;
  TextParameters texts_;
  std::string held_;         // neither told nor dropped yet
  bool fresh_ = true;        // nothing but white space came since the beginning, or the last call
  bool after_call_ = false;  // white space and `close` are dropped
  size_t calls_ = 0;

  // State of the JSON object that is being read, with its `open`; or of the syntax's own text.
  bool in_object_ = false;
  bool marked_ = false;  // `open` stood before it
  size_t object_ = 0;    // its brace in held_
  size_t at_ = 0;        // the next byte to look at
  int depth_ = 0;
  bool in_string_ = false;
};

}  // namespace treadle
