// Chat templates: an interpreter for the part of Jinja that models' templates use.
//
// No host access; steps, nesting and output are bounded, so a hostile template ends in an error. An
// error names the template's line and what was not understood. Thread safety: constant after Parse;
// Render may be called from any thread.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

// A call of a tool, by an assistant. `arguments` is a JSON object's text.
struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;
};

struct ChatMessage {
  std::string role;
  // Without any, beside calls, templates see none; or, where they cannot render that, "".
  std::optional<std::string> content;
  std::vector<ToolCall> tool_calls = {};
  // Of a tool's answer; empty: templates see none. The name is the tool's.
  std::string tool_call_id = {};
  std::string name = {};
  // Thought by an assistant before it said the content; empty: templates see none.
  std::string reasoning = {};
};

struct ChatOptions {
  bool add_generation_prompt = true;
  std::string bos_token;
  std::string eos_token;
  std::string tools;  // that the model may call: a JSON array's text, as OpenAI's; empty: none
  std::vector<std::pair<std::string, std::string>> variables;  // further string variables
  std::string arguments;  // further variables: a JSON object's text; empty: none
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
};

class ChatTemplate {
 public:
  static absl::StatusOr<ChatTemplate> Parse(std::string_view source);
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  // InvalidArgument when the template itself raises (raise_exception('...') gives its text);
  // ResourceExhausted when it needs more than its budget (jinja/value.h); DeadlineExceeded.
  absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& messages,
                                     const ChatOptions& options) const;

  // What was parsed.
  const std::string& source() const;

  // Whether usual conversations are within the budget: ResourceExhausted, if not.
  absl::Status CheckCost() const;

 private:
  struct Program;
  explicit ChatTemplate(std::unique_ptr<Program> program);
  std::unique_ptr<Program> program_;
};

}  // namespace treadle
