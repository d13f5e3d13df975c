// Chat templates: an interpreter for the part of Jinja that models' templates use.
//
// No host access; steps, nesting and output are bounded, so a hostile template ends in an error. An
// error names the template's line and what was not understood. Thread safety: constant after Parse;
// Render may be called from any thread.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

struct ChatMessage {
  std::string role;
  std::string content;
};

struct ChatOptions {
  bool add_generation_prompt = true;
  std::string bos_token;
  std::string eos_token;
  std::vector<std::pair<std::string, std::string>> variables;  // further string variables
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

  // Whether usual conversations are within the budget: ResourceExhausted, if not.
  absl::Status CheckCost() const;

 private:
  struct Program;
  explicit ChatTemplate(std::unique_ptr<Program> program);
  std::unique_ptr<Program> program_;
};

}  // namespace treadle
