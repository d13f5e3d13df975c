#include "server/openai/block_answer.h"

#include "server/openai/openai_call.h"

namespace treadle {

BlockAnswer::BlockAnswer(const OpenAiRequest& request)
    : stream_(request.stream), reading_(request.reading), call_ids_(NewId("")) {
  if (reading_.tools != nullptr || reading_.reasoning != nullptr) reader_.emplace(reading_);
}

void BlockAnswer::Tell(std::string event) {
  if (stream_) events_ += event;
}

bool BlockAnswer::Add(size_t /*prompt*/, const SessionEvent& event) {
  if (event.prompt != nullptr) {
    prompt_tokens_ = static_cast<int64_t>(event.prompt->request.prompt.size());
    cached_tokens_ = event.prompt->cached_tokens;
    Tell(Begin());
  }
  const bool enough = event.output != nullptr && AddOutput(*event.output);
  if (event.end != nullptr) {
    Close();
    Tell(End());
  }
  return enough;
}

bool BlockAnswer::AddOutput(const OutputPart& part) {
  if (ended_) return false;
  // A token at a time, since each is counted as what it says.
  size_t told = 0;
  for (size_t i = 0; i < part.token_ids.size() && !ended_; ++i) {
    ++completion_tokens_;
    if (!reader_) continue;
    reader_->BeginToken();
    const size_t end = i < part.ends.size() ? part.ends[i] : part.text.size();
    AddText(reader_->Push(part.text.substr(told, end - told)));
    told = end;
    ended_ = !reading_.parallel && called();
  }
  if (ended_) {
    finish_ = FinishReason::kEndToken;
    return part.finish == FinishReason::kNone;
  }
  const std::string rest = part.text.substr(told);
  AddText(reader_ ? reader_->Push(rest)
                  : AnswerText{.reasoning = "", .content = rest, .calls = {}});
  if (part.finish == FinishReason::kNone) return false;
  if (reader_) AddText(reader_->Finish());
  finish_ = part.finish;
  stop_string_ = part.stop_string;
  return false;
}

void BlockAnswer::AddText(AnswerText text) {
  Grow(Kind::kReasoning, text.reasoning);
  Grow(Kind::kText, text.content);
  for (ToolCall& call : text.calls) {
    Close();
    Open(Kind::kCall, std::move(call.name));
    Grow(Kind::kCall, call.arguments);
    Close();
  }
}

void BlockAnswer::Open(Kind kind, std::string called) {
  const std::string call =
      kind == Kind::kCall ? reading_.tools->CallId(call_ids_, calls_++) : std::string();
  blocks_.push_back({kind, blocks_.size(), NewBlockId(kind, call), std::move(called)});
  open_ = true;
  Tell(BeginBlock(blocks_.back()));
}

void BlockAnswer::Grow(Kind kind, std::string_view text) {
  if (text.empty()) return;
  if (open_ && blocks_.back().kind != kind) Close();
  if (!open_) Open(kind);
  blocks_.back().text += text;
  Tell(GrowBlock(blocks_.back(), text));
}

void BlockAnswer::Close() {
  if (std::exchange(open_, false)) Tell(EndBlock(blocks_.back()));
}

}  // namespace treadle
