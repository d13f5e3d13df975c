// LiveSequence: the tokens of a sequence, their tags and their counts.
#include <algorithm>
#include <utility>

#include "base/status.h"
#include "engine/plan/sequence_table.h"

namespace treadle {

// The finalizer of MurmurHash3 (Appleby) over the chain so far and the token.
uint64_t NextTag(uint64_t before, int32_t token) {
  uint64_t tag = before + 0x9E3779B97F4A7C15 * (uint64_t{static_cast<uint32_t>(token)} + 1);
  tag = (tag ^ (tag >> 33)) * 0xFF51AFD7ED558CCD;
  tag = (tag ^ (tag >> 33)) * 0xC4CEB9FE1A85EC53;
  tag ^= tag >> 33;
  return tag == 0 ? 1 : tag;
}

LiveSequence::LiveSequence(const SequenceStart& start, int64_t capacity)
    : start_(start),
      capacity_(capacity),
      written_(start.first_position),
      counting_(start.sampling.NeedsCounts()) {
  ids_.reserve(static_cast<size_t>(capacity_));
  tags_.reserve(static_cast<size_t>(capacity_));
  if (counting_) counts_.reserve(static_cast<size_t>(capacity_));
  Enter(0, start.earlier_tokens);
  start_.earlier_tokens.clear();
}

void LiveSequence::Enter(int64_t first_position, std::span<const int32_t> ids) {
  TREADLE_CHECK(first_position >= 0 && first_position <= next_position());
  TREADLE_CHECK(first_position + static_cast<int64_t>(ids.size()) <= capacity_);
  previous_sample_ = -1;
  tags_.resize(std::min(tags_.size(), static_cast<size_t>(first_position)));
  while (next_position() > first_position) {
    Count(ids_.back(), next_position() - 1, -1);
    ids_.pop_back();
  }
  for (const int32_t id : ids) {
    TREADLE_CHECK(!counting_ || id >= 0);
    Count(id, next_position(), +1);
    ids_.push_back(id);
  }
  written_ = std::max(written_, next_position());
}

std::span<const uint64_t> LiveSequence::Tags(int64_t end) {
  const auto count = static_cast<size_t>(std::min(end, next_position()));
  while (tags_.size() < count && ids_[tags_.size()] >= 0) {
    tags_.push_back(NextTag(tags_.empty() ? start_.adapter : tags_.back(), ids_[tags_.size()]));
  }
  return std::span(tags_).first(std::min(count, tags_.size()));
}

void LiveSequence::Resolve(int64_t position, int32_t token) {
  if (position == next_position() && previous_sample_ < -1) previous_sample_ = token;
  if (position < next_position() && ids_[position] < -1) ids_[position] = token;
}

void LiveSequence::SetAdapter(std::shared_ptr<const Adapter> adapter, int32_t virtual_tokens) {
  adapter_ = std::move(adapter);
  const int64_t entered = std::min<int64_t>(virtual_tokens, next_position());
  for (int64_t i = 0; i < entered; ++i) Count(ids_[i], i, -1);
  virtual_tokens_ = virtual_tokens;
}

std::vector<TokenCount> LiveSequence::CountsBefore(int64_t position) const {
  std::vector<TokenCount> counts = counts_;
  const int64_t first = std::max<int64_t>(position, virtual_tokens_);
  for (int64_t i = first; counting_ && i < next_position(); ++i) {
    const auto it = std::ranges::lower_bound(counts, ids_[i], {}, &TokenCount::token);
    --(i < start_.prompt_length ? it->in_prompt : it->in_output);
  }
  std::erase_if(
      counts, [](const TokenCount& count) { return count.in_prompt == 0 && count.in_output == 0; });
  return counts;
}

// A sorted vector: no allocation once its capacity is there, a search of a few steps, and a new
// token moves at most 12 bytes per distinct token.
void LiveSequence::Count(int32_t token, int64_t position, int32_t change) {
  if (!counting_ || token < 0 || position < virtual_tokens_) return;
  auto it = std::ranges::lower_bound(counts_, token, {}, &TokenCount::token);
  if (it == counts_.end() || it->token != token) it = counts_.insert(it, {.token = token});
  (position < start_.prompt_length ? it->in_prompt : it->in_output) += change;
  TREADLE_CHECK(it->in_prompt >= 0 && it->in_output >= 0);
  if (it->in_prompt == 0 && it->in_output == 0) counts_.erase(it);
}

}  // namespace treadle
