#include "engine/live_sequence.h"

#include <algorithm>

#include "base/status.h"

namespace treadle {

LiveSequence::LiveSequence(const SequenceStart& start, int64_t page_size)
    : start_(start),
      capacity_(static_cast<int64_t>(start.pages.size()) * page_size),
      counting_(start.sampling.NeedsCounts()) {
  ids_.reserve(static_cast<size_t>(capacity_));
  if (counting_) counts_.reserve(static_cast<size_t>(capacity_));
  if (start.earlier_tokens.empty()) {
    ids_.assign(static_cast<size_t>(start.first_position), -1);
  } else {
    Enter(0, start.earlier_tokens);
  }
  start_.earlier_tokens.clear();
}

void LiveSequence::Enter(int64_t first_position, std::span<const int32_t> ids) {
  TREADLE_CHECK(first_position >= 0 && first_position <= next_position());
  TREADLE_CHECK(first_position + static_cast<int64_t>(ids.size()) <= capacity_);
  previous_sample_ = -1;
  while (next_position() > first_position) {
    Count(ids_.back(), next_position() - 1, -1);
    ids_.pop_back();
  }
  for (const int32_t id : ids) {
    TREADLE_CHECK(!counting_ || id >= 0);
    Count(id, next_position(), +1);
    ids_.push_back(id);
  }
}

void LiveSequence::Resolve(int64_t position, int32_t token) {
  if (position == next_position() && previous_sample_ < -1) previous_sample_ = token;
  if (position < next_position() && ids_[position] < -1) ids_[position] = token;
}

// A sorted vector: no allocation once its capacity is there, a search of a few steps, and a new
// token moves at most 12 bytes per distinct token.
void LiveSequence::Count(int32_t token, int64_t position, int32_t change) {
  if (!counting_ || token < 0) return;
  auto it = std::lower_bound(counts_.begin(), counts_.end(), token,
                             [](const TokenCount& count, int32_t id) { return count.token < id; });
  if (it == counts_.end() || it->token != token) it = counts_.insert(it, {.token = token});
  (position < start_.prompt_length ? it->in_prompt : it->in_output) += change;
  TREADLE_CHECK(it->in_prompt >= 0 && it->in_output >= 0);
  if (it->in_prompt == 0 && it->in_output == 0) counts_.erase(it);
}

}  // namespace treadle
