// A drafter that knows the sequence's answer, and guesses some of it wrong.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/op_cases/random.h"
#include "scheduler/request/drafter.h"

namespace treadle {

class OracleDrafter final : public Drafter {
 public:
  // `tokens`, of which the sequence has the first `at`; every fourth guess or so is wrong, as
  // `seed` has it.
  OracleDrafter(std::vector<int32_t> tokens, size_t at, uint64_t seed, int32_t vocab = 64)
      : tokens_(std::move(tokens)), at_(at), seed_(seed), vocab_(vocab) {}

  void Append(int32_t) override { ++at_; }
  std::vector<Guess> Next(int32_t count) const override {
    Random random(seed_ + at_ * 977);
    std::vector<Guess> guesses;
    for (size_t i = at_; i < tokens_.size() && std::ssize(guesses) < count; ++i) {
      const bool wrong = random.Below(4) == 0;
      guesses.push_back({wrong ? (tokens_[i] + 1) % vocab_ : tokens_[i], 1.0});
    }
    return guesses;
  }

 private:
  const std::vector<int32_t> tokens_;
  size_t at_;
  const uint64_t seed_;
  const int32_t vocab_;
};

}  // namespace treadle
