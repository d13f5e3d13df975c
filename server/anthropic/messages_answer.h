// One answer of Anthropic's Messages API in the making. Not thread-safe.
#pragma once

#include <string>
#include <string_view>

#include "server/openai/block_answer.h"

namespace treadle {

class MessagesAnswer final : public BlockAnswer {
 public:
  // `id`: of the message. `model` must outlive this.
  MessagesAnswer(const ServedModel& model, const OpenAiRequest& request, std::string id);

  std::string Whole() const override;
  std::string ErrorEvent(const HttpResponse& error) override;

 private:
  std::string NewBlockId(Kind kind, const std::string& call) const override;
  std::string Begin() override;
  std::string BeginBlock(const Block& block) override;
  std::string GrowBlock(const Block& block, std::string_view text) override;
  std::string EndBlock(const Block& block) override;
  std::string End() override;
  // A block of content, of that text.
  static std::string BlockText(const Block& block, const std::string& text);
  std::string Message(const std::string& content, const std::string& stop) const;
  std::string Stop() const;
  std::string Usage() const;

  const std::string name_;  // that the answer says
  const std::string id_;
  const int64_t max_tokens_;
};

// Errors as Anthropic's clients know them: {"type": "error", "error": {"type", "message"}}.
HttpResponse MessagesError(const absl::Status& status);

}  // namespace treadle
