#include "server/session/generation.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

// Length of the longest end of `text` that begins `stop` without being all of it.
size_t Overlap(std::string_view text, std::string_view stop) {
  for (size_t length = std::min(text.size(), stop.size() - 1); length > 0; --length) {
    if (text.substr(text.size() - length) == stop.substr(0, length)) return length;
  }
  return 0;
}

// Divided by its Euclidean length, which is summed as double in the order of elements.
std::vector<float> Normalized(std::vector<float> vector) {
  constexpr double kLeast = 1e-12;  // a vector of zeros stays one
  double squares = 0;
  for (const float value : vector) squares += double{value} * double{value};
  const double length = std::max(std::sqrt(squares), kLeast);
  for (float& value : vector) value = static_cast<float>(double{value} / length);
  return vector;
}

}  // namespace

std::string StopMatcher::Push(std::string_view text) {
  if (found_ >= 0) return "";
  held_ += text;
  size_t best_end = std::string::npos;
  size_t best_begin = 0;
  for (size_t i = 0; i < stops_.size(); ++i) {
    const size_t begin = held_.find(stops_[i]);
    if (begin == std::string::npos) continue;
    const size_t end = begin + stops_[i].size();
    if (best_end == std::string::npos || end < best_end ||
        (end == best_end && begin < best_begin)) {
      best_end = end;
      best_begin = begin;
      found_ = static_cast<int>(i);
    }
  }
  size_t settled = best_begin;
  if (found_ < 0) {
    size_t keep = 0;
    for (const std::string& stop : stops_) keep = std::max(keep, Overlap(held_, stop));
    settled = held_.size() - keep;
  }
  std::string out = held_.substr(0, settled);
  held_.erase(0, settled);
  if (found_ >= 0) held_.clear();
  return out;
}

std::string StopMatcher::Finish() { return std::exchange(held_, std::string()); }

Generation::Generation(const Tokenizer* tokenizer, const RequestSpec& request,
                       const std::vector<std::string>& stop_strings, bool special_tokens)
    : min_new_tokens_(request.min_new_tokens), logprobs_(request.top_logprobs >= 0) {
  for (int32_t i = 0; i < request.candidates; ++i) {
    Candidate& candidate =
        candidates_.emplace_back(Candidate{.matcher = StopMatcher(stop_strings)});
    if (tokenizer) candidate.decoder.emplace(*tokenizer, special_tokens);
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
  if (!token.embedding.empty()) part.embedding = Normalized(token.embedding);
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
  if (token.token >= 0) part.ends.push_back(part.text.size());
  candidate.finished = part.finish != FinishReason::kNone;
}

}  // namespace treadle
