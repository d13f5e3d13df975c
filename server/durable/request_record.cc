#include "server/durable/request_record.h"

#include <algorithm>
#include <iterator>

namespace treadle {

bool RequestRecord::Take(const Frame& frame, FramePlace place) {
  auto attempt = std::ranges::lower_bound(attempts, frame.attempt, {}, &Attempt::number);
  if (attempt == attempts.end()) {
    if (frame.first < frames.size()) frames.resize(frame.first);
  } else if (attempt->number != frame.attempt) {
    if (attempt->first <= frame.first) return false;
    for (size_t i = frame.first; i < std::min<size_t>(attempt->first, frames.size()); ++i) {
      frames[i] = {};
    }
  }
  if (attempt == attempts.end() || attempt->number != frame.attempt) {
    attempt = attempts.insert(attempt, {frame.attempt, frame.first});
    const auto replaced =
        std::ranges::lower_bound(attempts.begin(), attempt, frame.first, {}, &Attempt::first);
    attempt = attempts.erase(replaced, attempt);
  }
  const auto next = std::next(attempt);
  if (frame.index < attempt->first) return false;
  if (next != attempts.end() && frame.index >= next->first) return false;
  if (frame.index >= frames.size()) frames.resize(size_t{frame.index} + 1);
  if (frames[frame.index].segment != 0) return false;  // a copy
  frames[frame.index] = place;
  bytes += static_cast<int64_t>(frame.bytes());
  return true;
}

uint32_t RequestRecord::AttemptOf(uint32_t index) const {
  return std::prev(std::ranges::upper_bound(attempts, index, {}, &Attempt::first))->number;
}

void RequestRecord::Cut(uint32_t index, uint32_t least_attempt) {
  frames.resize(index);
  const uint32_t number = std::max(least_attempt, attempts.back().number + 1);
  attempts.erase(std::ranges::lower_bound(attempts, index, {}, &Attempt::first), attempts.end());
  attempts.push_back({number, index});
}

}  // namespace treadle
