// An answer of a model as a terminal shows it: what the model thinks is dim, and nothing in the
// text drives the terminal. Without colours the text has the model's marks of what it thinks, and a
// pipe gets it byte for byte.
//
// `opened`: GetModelInfo's reasoning_opened.
//
// Not thread-safe.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "server/openai/tools/reasoning.h"

namespace treadle {

class ChatAnswer {
 public:
  ChatAnswer(bool terminal, bool colours, std::string_view opened = {});

  // The text to write for the next piece of the answer.
  std::string Push(const std::string& piece);
  // The same after the last one.
  std::string Finish();

  // The answer without what was thought: for the next turn.
  const std::string& content() const { return content_; }

 private:
  void Decide(bool end);
  std::string Show(const AnswerText& text);
  std::string Plain(const std::string& piece) const;

  const bool terminal_, colours_;
  std::string held_;                    // text of which it is open whether it is thought
  std::optional<AnswerReader> reader_;  // set once that is known
  std::string content_;
  bool thought_ = false, said_ = false;
};

}  // namespace treadle
