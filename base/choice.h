// Words for the values of an enumeration, as a table: read where text comes in, shown where it goes
// out. In between there is only the enumeration.
//
// Tables are constants with a row for every value that may be chosen. Pure; any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace treadle {

template <typename T>
struct Choice {
  std::string_view word;
  T value;
};

template <typename T, size_t N>
constexpr std::optional<T> ValueOf(const Choice<T> (&choices)[N], std::string_view word) {
  for (const Choice<T>& choice : choices) {
    if (choice.word == word) return choice.value;
  }
  return std::nullopt;
}

// All words, "a, b, c".
template <typename T, size_t N>
std::string WordsOf(const Choice<T> (&choices)[N]) {
  std::string words;
  for (const Choice<T>& choice : choices) {
    if (!words.empty()) words += ", ";
    words += choice.word;
  }
  return words;
}

// "?" for a value that has no row.
template <typename T, size_t N>
constexpr std::string_view WordOf(const Choice<T> (&choices)[N], T value) {
  for (const Choice<T>& choice : choices) {
    if (choice.value == value) return choice.word;
  }
  return "?";
}

}  // namespace treadle
