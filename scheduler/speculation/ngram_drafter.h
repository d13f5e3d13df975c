// Guesses that a sequence repeats itself: what followed the longest earlier occurrence of its last
// tokens follows again (prompt lookup: Saxena 2023; SuffixDecoding, Oliaro et al. 2025, section 3).
// It sees its own sequence only, so no other request shows in what it guesses.
//
// Occurrences are found as in LZ77: a hash table of the last kMinMatch tokens, and for each
// position the one before it with the same hash. Append takes constant time; a token takes about 20
// bytes.
//
// Probabilities are learnt by match length: each token that comes shows whether the guess for it,
// which nobody may have asked for, was right. So text that does not repeat itself is known without
// a single row spent on it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/request/drafter.h"

namespace treadle {

class NgramDrafter final : public Drafter {
 public:
  static constexpr int32_t kMinMatch = 2, kMaxMatch = 64;
  static constexpr int32_t kLongEnough = 16;  // a match that goes on is not compared with others
  static constexpr int kMaxOccurrences = 16;  // looked at, the latest first

  explicit NgramDrafter(std::span<const int32_t> tokens);

  void Append(int32_t token) override;
  std::vector<Guess> Next(int32_t count) const override;

 private:
  static constexpr int kLengths = 5;  // of a match: 2, 3..4, 5..8, 9..16, more

  static size_t Bucket(int32_t match);
  size_t Hash() const;  // of the last kMinMatch tokens
  void Push(int32_t token);
  void Rehash();
  void Search();
  int32_t MatchAt(int32_t next) const;

  std::vector<int32_t> tokens_;
  std::vector<int32_t> latest_;    // by hash: the position after the latest occurrence; 0: none
  std::vector<int32_t> previous_;  // by such a position: the one before it with the same hash
  // The guess: what comes is what stands at `next_`, for `match_` tokens before it are those at the
  // end. 0: there is none.
  int32_t next_ = 0;
  int32_t match_ = 0;
  std::array<double, kLengths> right_ = {0.2, 0.4, 0.6, 0.75, 0.9};  // share of right guesses
};

std::unique_ptr<Drafter> MakeNgramDrafter(const Request& request, const Sequence& sequence);

}  // namespace treadle
