// Finds stop strings in text that arrives in pieces.
//
// The stop string that is complete first ends the text, wherever the pieces' borders are; of two
// that are complete at the same character, the longer one counts. Text that could still be the
// beginning of a stop string is held back. Not thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace treadle {

class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // Text that is settled: no stop string can begin in it. Nothing more after a match.
  std::string Push(std::string_view text);
  // What was held back; the text has ended.
  std::string Finish();

  // The stop string that was found, or null. It is not part of the text.
  const std::string* found() const { return found_ < 0 ? nullptr : &stops_[found_]; }

 private:
  const std::vector<std::string> stops_;
  std::string held_;
  int found_ = -1;
};

}  // namespace treadle
