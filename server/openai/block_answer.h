// An answer of an API that tells it as blocks: pieces of text, and calls of tools. A derived class
// writes them as its API does; not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/openai/http_api.h"
#include "server/openai/tool_calls.h"

namespace treadle {

class BlockAnswer : public HttpAnswer {
 public:
  explicit BlockAnswer(const OpenAiRequest& request);

  void Add(size_t prompt, const SessionEvent& event) final;
  std::string TakeEvents() final { return std::exchange(events_, std::string()); }
  std::string LastEvents() final { return {}; }  // the others have all

 protected:
  struct Block {
    size_t index;
    std::string id;
    std::string text = {};              // of a call: its arguments
    std::optional<std::string> called;  // the tool, by name; none: it is text
  };

  // The id of a new block.
  virtual std::string NewBlockId(bool call) const = 0;
  // Events of a stream, in this order: the prompt is known; for each block its begin, what is new
  // of it, and its end; all is told. The last one is asked for without a stream, too.
  virtual std::string Begin() = 0;
  virtual std::string BeginBlock(const Block& block) = 0;
  virtual std::string GrowBlock(const Block& block, std::string_view text) = 0;
  virtual std::string EndBlock(const Block& block) = 0;
  virtual std::string End() = 0;

  const std::vector<Block>& blocks() const { return blocks_; }
  bool called() const { return called_; }
  FinishReason finish() const { return finish_; }
  const std::string& stop_string() const { return stop_string_; }
  int64_t prompt_tokens() const { return prompt_tokens_; }
  int64_t cached_tokens() const { return cached_tokens_; }
  int64_t completion_tokens() const { return completion_tokens_; }

 private:
  void AddText(ToolText text);
  void Grow(std::string_view text);
  void Open(std::optional<std::string> called);
  void Close();
  void Tell(std::string event);

  const bool stream_;
  std::optional<ToolCallReader> tools_;  // none: all of it is text
  std::vector<Block> blocks_;
  bool open_ = false;  // the last block may grow
  std::string events_;
  bool called_ = false;
  FinishReason finish_ = FinishReason::kNone;
  std::string stop_string_;
  int64_t prompt_tokens_ = 0, cached_tokens_ = 0, completion_tokens_ = 0;
};

}  // namespace treadle
