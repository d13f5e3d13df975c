// Pieces of JSON as text: answers are put together from them, because a stream's next piece is
// written for every token. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace treadle {

// In quotes, on one line for every reader: what ends a line in Unicode (U+0085, U+2028, U+2029) is
// escaped as the control characters are. Bytes that are no UTF-8 become U+FFFD.
std::string JsonString(std::string_view text);
// The shortest that reads back as the same float. JSON has no infinity: a log probability of -inf
// becomes -9999, as others write it.
std::string JsonLogprob(float value);
// A number that is not finite becomes null.
std::string JsonFloats(std::span<const float> values);
// [1,2,3]
std::string JsonIds(std::span<const int32_t> ids);

}  // namespace treadle
