#include "server/session/stop_matcher.h"

#include <algorithm>
#include <utility>

namespace treadle {
namespace {

// Length of the longest end of `text` that begins `stop` without being all of it.
size_t Overlap(std::string_view text, std::string_view stop) {
  for (size_t length = std::min(text.size(), stop.size() - 1); length > 0; --length) {
    if (text.substr(text.size() - length) == stop.substr(0, length)) return length;
  }
  return 0;
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

}  // namespace treadle
