// One request's answer in the making: what a TokenStream gives becomes text, token ids and finish
// information, per candidate. Incremental decoding, and stop strings across token borders.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/text/tokenizer.h"
#include "scheduler/request/request.h"

namespace treadle {

// Finds stop strings in text that arrives in pieces.
//
// The stop string that is complete first ends the text, wherever the pieces' borders are; of two
// that are complete at the same character, the longer one counts. Text that could still be the
// beginning of a stop string is held back.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // Text that is settled: no stop string can begin in it. Nothing more after a match.
  std::string Push(std::string_view text);
  // The text that was held back; it has ended.
  std::string Finish();

  // The stop string that was found, or null. It is not part of the text.
  const std::string* found() const { return found_ < 0 ? nullptr : &stops_[found_]; }

 private:
  const std::vector<std::string> stops_;
  std::string held_;
  int found_ = -1;
};

// The news of one candidate. An end token is among the ids, but not in the text; a token that
// completes a stop string is the last one.
struct OutputPart {
  uint32_t candidate = 0;
  std::string text = {};
  std::vector<int32_t> token_ids = {};
  std::vector<size_t> ends = {};          // one per id: size of the text once it was read
  std::vector<TokenDetail> details = {};  // one per id, if asked
  FinishReason finish = FinishReason::kNone;
  std::string stop_string = {};       // with kStopString
  int32_t stop_token = -1;            // with kEndToken
  std::vector<float> embedding = {};  // with kPooled: of length 1 (Euclid's), and all there is
};

struct GenerationOptions {
  bool special_tokens = false;       // control tokens are text, too
  bool include_stop_string = false;  // is the text's end
  int32_t dimensions = 0;            // of an embedding: its first ones alone; 0: all
};

class Generation {
 public:
  // `tokenizer`, which must outlive this, may be null: no text then. Stop strings count from token
  // request.min_new_tokens on.
  Generation(const Tokenizer* tokenizer, const RequestSpec& request,
             const std::vector<std::string>& stop_strings, const GenerationOptions& options = {});

  // One part for each candidate with news, ascending. If one finished with kStopString, the
  // pool must be told (FinishCandidate). Tokens of a candidate that has finished are dropped.
  std::vector<OutputPart> Absorb(const std::vector<StreamToken>& tokens);

  // Tokens delivered so far, over all candidates.
  int32_t completion_tokens() const { return completion_tokens_; }

 private:
  struct Candidate {
    StopMatcher matcher;
    std::optional<StreamDecoder> decoder;  // none without a tokenizer
    int32_t tokens = 0;
    bool finished = false;
  };
  void AbsorbToken(const StreamToken& token, Candidate& candidate, OutputPart& part);

  const int32_t min_new_tokens_;
  const bool logprobs_;
  const GenerationOptions options_;
  std::vector<Candidate> candidates_;
  int32_t completion_tokens_ = 0;
};

}  // namespace treadle
