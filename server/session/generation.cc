#include "server/session/generation.h"

#include <map>
#include <utility>

#include "base/status.h"

namespace treadle {

Generation::Generation(const Tokenizer* tokenizer, const RequestSpec& request,
                       const std::vector<std::string>& stop_strings)
    : min_new_tokens_(request.min_new_tokens), logprobs_(request.top_logprobs >= 0) {
  for (int32_t i = 0; i < request.candidates; ++i) {
    Candidate& candidate = candidates_.emplace_back(StopMatcher(stop_strings));
    if (tokenizer) candidate.decoder.emplace(*tokenizer, /*special=*/false);
  }
}

std::vector<OutputPart> Generation::Absorb(const std::vector<StreamToken>& tokens) {
  std::map<uint32_t, OutputPart> by_candidate;
  for (const StreamToken& token : tokens) {
    TREADLE_CHECK(token.candidate < candidates_.size());
    Candidate& candidate = candidates_[token.candidate];
    if (candidate.finished) continue;
    OutputPart& part = by_candidate[token.candidate];
    part.candidate = token.candidate;
    AbsorbToken(token, candidate, part);
  }
  std::vector<OutputPart> parts;
  for (auto& [index, part] : by_candidate) parts.push_back(std::move(part));
  return parts;
}

void Generation::AbsorbToken(const StreamToken& token, Candidate& candidate, OutputPart& part) {
  // A request may end without a last token (its stop string was seen elsewhere).
  if (token.token >= 0) {
    part.token_ids.push_back(token.token);
    if (logprobs_) part.details.push_back(token.detail);
    ++candidate.tokens;
    ++completion_tokens_;
  }
  std::string text;
  if (candidate.decoder) {
    if (token.token >= 0 && token.finish != FinishReason::kEndToken) {
      text = candidate.decoder->Push(token.token);
    }
    if (token.finish != FinishReason::kNone) text += candidate.decoder->Finish();
  }
  if (candidate.tokens < min_new_tokens_) {
    part.text += text;
  } else {
    part.text += candidate.matcher.Push(text);
  }

  if (const std::string* stop = candidate.matcher.found()) {
    part.finish = FinishReason::kStopString;
    part.stop_string = *stop;
  } else if (token.finish != FinishReason::kNone) {
    part.text += candidate.matcher.Finish();
    part.finish = token.finish;
    if (token.finish == FinishReason::kEndToken) part.stop_token = token.token;
  }
  candidate.finished = part.finish != FinishReason::kNone;
}

}  // namespace treadle
