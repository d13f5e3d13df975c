#include "server/cli/chat/chat_answer.h"

#include <utility>

#include "base/utf8.h"
#include "server/cli/help/terminal.h"

namespace treadle {
namespace {

// Text in which nothing but line ends and tabs moves the cursor.
std::string Harmless(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const size_t length = std::min(text.find_first_of("\n\t"), text.size());
    shown += Printable(text.substr(0, length));
    if (length < text.size()) shown += text[length];
    text.remove_prefix(std::min(length + 1, text.size()));
  }
  return shown;
}

}  // namespace

ChatAnswer::ChatAnswer(bool terminal, bool colours, std::string_view opened)
    : terminal_(terminal), colours_(colours) {
  if (const ReasoningFormat* const format = ReasoningOpenedBy(opened).format) {
    reader_.emplace(AnswerReader::Options{.reasoning = format, .thinking = Thinking::kBegun});
  }
}

void ChatAnswer::Decide(bool end) {
  if (reader_) return;
  const OpenedReasoning opened = ReasoningOpenedBy(held_);
  if (!opened.undecided || end) reader_.emplace(AnswerReader::Options{.reasoning = opened.format});
}

std::string ChatAnswer::Show(const AnswerText& text) {
  std::string shown;
  if (!text.reasoning.empty()) {
    thought_ = true;
    shown += Styled(Harmless(text.reasoning), kDim, colours_);
  }
  if (!text.content.empty()) {
    if (thought_ && !std::exchange(said_, true)) shown += "\n\n";
    shown += Harmless(text.content);
    content_ += text.content;
  }
  return shown;
}

std::string ChatAnswer::Plain(const std::string& piece) const {
  if (colours_) return "";
  return terminal_ ? Harmless(piece) : piece;
}

std::string ChatAnswer::Push(const std::string& piece) {
  held_ += piece;
  Decide(/*end=*/false);
  if (!reader_) return Plain(piece);
  const std::string shown = Show(reader_->Push(std::exchange(held_, "")));
  return colours_ ? shown : Plain(piece);
}

std::string ChatAnswer::Finish() {
  Decide(/*end=*/true);
  std::string shown = Show(reader_->Push(std::exchange(held_, "")));
  shown += Show(reader_->Finish());
  return colours_ ? shown : "";
}

}  // namespace treadle
