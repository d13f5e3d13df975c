// An answer of an API that tells it as blocks: what the model thinks, what it says, calls of tools.
// A derived class writes them as its API does; not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/openai/http_api.h"
#include "server/openai/tools/reasoning.h"

namespace treadle {

class BlockAnswer : public HttpAnswer {
 public:
  explicit BlockAnswer(const OpenAiRequest& request);

  bool Add(size_t prompt, const SessionEvent& event) final;
  std::string TakeEvents() final { return std::exchange(events_, std::string()); }
  std::string LastEvents() final { return {}; }  // the others have all

 protected:
  enum class Kind : uint8_t { kReasoning, kText, kCall };
  struct Block {
    Kind kind;
    size_t index;
    std::string id;
    std::string called = {};  // of a call: the tool, by name
    std::string text = {};    // of a call: its arguments
  };

  // The id of a new block; `call`: the one that the model's templates take for its call.
  virtual std::string NewBlockId(Kind kind, const std::string& call) const = 0;
  // Events of a stream, in this order: the prompt is known; for each block its begin, what is new
  // of it, and its end; all is told. The last one is asked for without a stream, too.
  virtual std::string Begin() = 0;
  virtual std::string BeginBlock(const Block& block) = 0;
  virtual std::string GrowBlock(const Block& block, std::string_view text) = 0;
  virtual std::string EndBlock(const Block& block) = 0;
  virtual std::string End() = 0;

  const std::vector<Block>& blocks() const { return blocks_; }
  bool called() const { return calls_ > 0; }
  FinishReason finish() const { return finish_; }
  const std::string& stop_string() const { return stop_string_; }
  int64_t prompt_tokens() const { return prompt_tokens_; }
  int64_t cached_tokens() const { return cached_tokens_; }
  int64_t completion_tokens() const { return completion_tokens_; }
  int64_t reasoning_tokens() const { return reader_ ? reader_->reasoning_tokens() : 0; }

 private:
  bool AddOutput(const OutputPart& part);
  void AddText(AnswerText text);
  void Grow(Kind kind, std::string_view text);
  void Open(Kind kind, std::string called = {});
  void Close();
  void Tell(std::string event);

  const bool stream_;
  const AnswerReader::Options reading_;
  const std::string call_ids_;          // begins the ids of its calls
  std::optional<AnswerReader> reader_;  // none: all of it is text
  std::vector<Block> blocks_;
  bool open_ = false;   // the last block may grow
  bool ended_ = false;  // with the only call that was wanted
  std::string events_;
  int64_t calls_ = 0;
  FinishReason finish_ = FinishReason::kNone;
  std::string stop_string_;
  int64_t prompt_tokens_ = 0, cached_tokens_ = 0, completion_tokens_ = 0;
};

}  // namespace treadle
