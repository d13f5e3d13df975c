#include "scheduler/speculation/ngram_drafter.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "scheduler/request/request.h"

namespace treadle {
namespace {

constexpr size_t kMinTable = 256;
constexpr double kLearning = 1.0 / 8;  // the weight of the newest guess

}  // namespace

NgramDrafter::NgramDrafter(std::span<const int32_t> tokens) {
  tokens_.reserve(tokens.size() * 2);
  for (const int32_t token : tokens) Push(token);
  Search();
}

size_t NgramDrafter::Bucket(int32_t match) {
  const auto log = std::bit_width(static_cast<uint32_t>(match - 1)) - 1;  // 2: 0, 3..4: 1, 5..8: 2
  return std::min<size_t>(static_cast<size_t>(log), kLengths - 1);
}

size_t NgramDrafter::Hash() const {
  uint64_t hash = 0;
  for (auto token = tokens_.end() - kMinMatch; token != tokens_.end(); ++token) {
    hash = (hash + static_cast<uint32_t>(*token) + 1) * 0x9e3779b97f4a7c15;
  }
  return static_cast<size_t>(hash >> 32) & (latest_.size() - 1);
}

// Enters the token, and where its last tokens occur.
void NgramDrafter::Push(int32_t token) {
  tokens_.push_back(token);
  previous_.push_back(0);
  if (tokens_.size() > latest_.size() / 2) Rehash();
  if (tokens_.size() < kMinMatch) return;
  int32_t& latest = latest_[Hash()];
  previous_.back() = latest;
  latest = static_cast<int32_t>(tokens_.size());
}

void NgramDrafter::Rehash() {
  latest_.assign(std::max(kMinTable, latest_.size() * 4), 0);
  const std::vector<int32_t> tokens = std::exchange(tokens_, {});
  tokens_.reserve(tokens.size() * 2);
  previous_.clear();
  for (const int32_t token : std::span(tokens).first(tokens.size() - 1)) Push(token);
  tokens_.push_back(tokens.back());
  previous_.push_back(0);
}

void NgramDrafter::Append(int32_t token) {
  const bool guessed = next_ > 0;
  const bool right = guessed && tokens_[static_cast<size_t>(next_)] == token;
  if (guessed) {
    double& share = right_[Bucket(match_)];
    share += kLearning * ((right ? 1.0 : 0.0) - share);
  }
  Push(token);
  next_ = right ? next_ + 1 : 0;
  match_ = right ? std::min(match_ + 1, kMaxMatch) : 0;
  if (match_ < kLongEnough) Search();
}

// How many tokens before `next` are those at the end.
int32_t NgramDrafter::MatchAt(int32_t next) const {
  int32_t match = 0;
  const auto size = static_cast<int32_t>(tokens_.size());
  while (match < kMaxMatch && match < next &&
         tokens_[static_cast<size_t>(next - 1 - match)] ==
             tokens_[static_cast<size_t>(size - 1 - match)]) {
    ++match;
  }
  return match;
}

// Takes the longest match, the latest of equal ones, if it is longer than the one that goes on.
void NgramDrafter::Search() {
  if (tokens_.empty()) return;
  int32_t next = previous_.back();
  for (int i = 0; next > 0 && i < kMaxOccurrences; ++i) {
    const int32_t match = MatchAt(next);
    if (match >= kMinMatch && match > match_) {
      next_ = next;
      match_ = match;
    }
    next = previous_[static_cast<size_t>(next) - 1];
  }
}

std::unique_ptr<Drafter> MakeNgramDrafter(const Request& request, const Sequence& sequence) {
  const std::span<const int32_t> text = request.spec.text();
  std::vector<int32_t> tokens(text.begin(), text.end());
  tokens.insert(tokens.end(), sequence.output.begin(), sequence.output.end());
  return std::make_unique<NgramDrafter>(tokens);
}

std::vector<Guess> NgramDrafter::Next(int32_t count) const {
  std::vector<Guess> guesses;
  if (next_ == 0) return guesses;
  double probability = 1;
  for (int32_t i = 0; i < count; ++i) {
    probability *= right_[Bucket(std::min(match_ + i, kMaxMatch))];
    const size_t at = static_cast<size_t>(next_ + i);
    // A repetition may run into itself.
    const int32_t token = at < tokens_.size() ? tokens_[at] : guesses[at - tokens_.size()].token;
    guesses.push_back({token, probability});
  }
  return guesses;
}

}  // namespace treadle
