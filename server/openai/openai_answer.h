// One answer of OpenAI's in the making: what the sessions of its prompts give becomes JSON, in
// pieces for a stream, or as a whole.
//
// Candidate c of prompt p is the choice p * n + c. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/openai/http_api.h"
#include "server/openai/openai_request.h"
#include "server/session/session.h"

namespace treadle {

class OpenAiAnswer final : public HttpAnswer {
 public:
  // `id`: of the answer; `created`: seconds since 1970. `model` must outlive this.
  OpenAiAnswer(const ServedModel& model, const OpenAiRequest& request, std::string id,
               int64_t created);

  void NumberEvents(uint64_t from) override {
    numbered_ = true;
    skipped_ = from;
  }
  bool Add(size_t prompt, const SessionEvent& event) override;
  std::string TakeEvents() override;
  std::string LastEvents() override;
  std::string Whole() const override;
  std::string ErrorEvent(const HttpResponse& error) override {
    return "data: " + error.body + "\n\n";
  }

 private:
  // Pieces of JSON arrays, and of text, that wait to be told.
  struct Choice {
    std::string text, reasoning;
    std::optional<AnswerReader> reader;  // none: all of it is text
    std::vector<ToolCall> calls;
    size_t told_calls = 0;
    std::string ids;
    // Log probabilities: an array each for completions; chats have objects, in `tokens`.
    std::string tokens, logprobs, tops, offsets;
    int64_t offset = 0;  // of the next token in the text, in characters
    std::string finish = {};
    std::string stop_reason = "null";
    bool news = false;
    bool begun = false;  // its first chunk was taken
    bool ended = false;  // what still comes is not told
  };
  struct Prompt {
    std::string ids;
    std::string logprobs;  // in vLLM's shape
  };

  void AddPrompt(size_t prompt, const SessionEvent::Prompt& event);
  bool AddOutput(Choice& choice, const OutputPart& part);
  void AddLogprob(Choice& choice, int32_t token, const TokenDetail* detail) const;
  std::string TokenText(int32_t token) const;
  void AddText(Choice& choice, AnswerText text);
  std::string ReasoningOf(const Choice& choice) const;
  std::string LogprobsOf(const Choice& choice) const;
  std::string PromptOf(size_t index) const;
  std::string Chunk(size_t index, const std::string& content, const std::string& logprobs,
                    const std::string& ids, bool finish);
  std::string Event(const std::string& data);
  std::string Usage() const;
  std::string Embeddings() const;

  const ServedModel& model_;
  const bool embedding_, base64_;
  const bool chat_, stream_, echo_, prompt_only_, token_ids_, logprobs_, prompt_logprobs_;
  const bool include_usage_, usage_in_chunks_;
  const size_t candidates_;
  const std::string id_;
  const AnswerReader::Options reading_;
  const bool include_reasoning_;
  std::string head_;                               // up to the choices
  std::vector<std::optional<std::string>> texts_;  // [prompts] to echo, where texts were given
  std::vector<Prompt> prompts_;
  std::vector<Choice> choices_;
  int64_t prompt_tokens_ = 0, cached_tokens_ = 0, completion_tokens_ = 0;
  int64_t draft_tokens_ = 0, accepted_draft_tokens_ = 0;
  int64_t calls_ = 0;  // of tools, over all choices
  bool numbered_ = false;
  uint64_t skipped_ = 0;
  uint64_t events_ = 0;  // so far
};

}  // namespace treadle
