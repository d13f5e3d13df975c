// Numbers in text that people and files give us. Pure; any thread.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace treadle {

// The whole of `text`, which has nothing before or after the number; nothing if it is no T.
template <typename T>
std::optional<T> NumberIn(std::string_view text) {
  T value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

}  // namespace treadle
