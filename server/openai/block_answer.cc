#include "server/openai/block_answer.h"

#include <utility>

namespace treadle {

BlockAnswer::BlockAnswer(const OpenAiRequest& request) : stream_(request.stream) {
  if (request.tool_format != nullptr) {
    tools_.emplace(*request.tool_format, request.parallel_tool_calls);
  }
}

void BlockAnswer::Tell(std::string event) {
  if (stream_) events_ += event;
}

void BlockAnswer::Add(size_t /*prompt*/, const SessionEvent& event) {
  if (event.prompt != nullptr) {
    prompt_tokens_ = static_cast<int64_t>(event.prompt->request.prompt.size());
    cached_tokens_ = event.prompt->cached_tokens;
    Tell(Begin());
  }
  if (const OutputPart* const part = event.output; part != nullptr) {
    completion_tokens_ += static_cast<int64_t>(part->token_ids.size());
    AddText(tools_ ? tools_->Push(part->text) : ToolText{part->text, {}});
    if (part->finish != FinishReason::kNone) {
      if (tools_) AddText(tools_->Finish());
      finish_ = part->finish;
      stop_string_ = part->stop_string;
    }
  }
  if (event.end == nullptr) return;
  Close();
  Tell(End());
}

void BlockAnswer::AddText(ToolText text) {
  if (!text.content.empty()) {
    if (!open_) Open(std::nullopt);
    Grow(text.content);
  }
  for (ToolCall& call : text.calls) {
    called_ = true;
    Close();
    Open(std::move(call.name));
    Grow(call.arguments);
    Close();
  }
}

void BlockAnswer::Open(std::optional<std::string> called) {
  const bool call = called.has_value();
  blocks_.push_back({blocks_.size(), NewBlockId(call), {}, std::move(called)});
  open_ = true;
  Tell(BeginBlock(blocks_.back()));
}

void BlockAnswer::Grow(std::string_view text) {
  blocks_.back().text += text;
  Tell(GrowBlock(blocks_.back(), text));
}

void BlockAnswer::Close() {
  if (std::exchange(open_, false)) Tell(EndBlock(blocks_.back()));
}

}  // namespace treadle
