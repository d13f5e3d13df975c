#include "server/session/generation.h"

#include <map>
#include <utility>

#include "base/status.h"

namespace treadle {

Generation::Candidate::Candidate(const GenerationOptions& options) : matcher(options.stop_strings) {
  if (options.tokenizer) decoder.emplace_back(*options.tokenizer, /*special=*/false);
}

Generation::Generation(const GenerationOptions& options) : options_(options) {
  candidates_.reserve(options.candidates);
  for (int32_t i = 0; i < options.candidates; ++i) candidates_.emplace_back(options_);
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
    if (options_.logprobs) part.details.push_back(token.detail);
    ++candidate.tokens;
    ++completion_tokens_;
  }
  std::string text;
  if (!candidate.decoder.empty()) {
    if (token.token >= 0 && token.finish != FinishReason::kEndToken) {
      text = candidate.decoder[0].Push(token.token);
    }
    if (token.finish != FinishReason::kNone) text += candidate.decoder[0].Finish();
  }
  if (candidate.tokens < options_.min_new_tokens) {
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
