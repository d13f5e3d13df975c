// Guesses what a sequence's next tokens are. The engine verifies a guess by sampling at each of its
// positions in one step, so a wrong one costs time and never changes a token.
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/choice.h"

namespace treadle {

// Where guesses of a request's next tokens come from.
enum class Speculate : uint8_t { kOff, kNgram, kDraft };
inline constexpr Choice<Speculate> kSpeculate[] = {
    {"off", Speculate::kOff}, {"ngram", Speculate::kNgram}, {"draft", Speculate::kDraft}};

struct Guess {
  int32_t token = 0;
  double probability = 0;  // that this token and all guesses before it come
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  // The sequence has another token.
  virtual void Append(int32_t token) = 0;
  // At most `count` tokens that may follow each other now, of falling probability.
  virtual std::vector<Guess> Next(int32_t count) const = 0;
  // The probability that a guess is right which a draft model would make if it were asked
  // (draft_model.h); 0: there is none, or what Next gives is as good.
  virtual double Promise() const { return 0; }
};

// Makes a drafter for a sequence of a request, with the tokens that it has.
struct Request;
struct Sequence;
using MakeDrafter = std::function<std::unique_ptr<Drafter>(const Request&, const Sequence&)>;

}  // namespace treadle
