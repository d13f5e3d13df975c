// Kinds of values of serve's flags, for the rows of the table. Pure.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/choice.h"
#include "server/configuration.h"

namespace treadle {

inline constexpr char kAnyText[] = R"({"type": "string"})";
inline constexpr char kAbsolutePath[] = R"({"type": "string", "pattern": "^/[^ ]*[^ /]$"})";

// A value that `parse` reads and `show` shows.
template <typename T>
FlagValue Value(T ServeOptions::*field, std::function<absl::StatusOr<T>(const std::string&)> parse,
                std::function<std::string(const T&)> show, std::string schema = kAnyText,
                std::string type = "TEXT") {
  return {.read = [=](ServeOptions& options, const std::string& text) -> absl::Status {
            absl::StatusOr<T> value = parse(text);
            if (value.ok()) options.*field = *std::move(value);
            return value.status();
          },
          .show = [=](const ServeOptions& options) { return show(options.*field); },
          .schema = std::move(schema),
          .type = std::move(type)};
}

// Numbers show 0 as `zero`, and read it where that is "auto".
FlagValue Integer(int64_t ServeOptions::*field, int64_t low, int64_t high, std::string zero = "0");
// Bytes; `expected` is for the error.
FlagValue Size(int64_t ServeOptions::*field, int64_t low, int64_t high, std::string expected,
               std::string zero = "0");
FlagValue Duration(std::chrono::milliseconds ServeOptions::*field);
// Shows the empty text as "none".
FlagValue Text(std::string ServeOptions::*field, std::string schema = kAnyText);
std::string ShowText(const std::string& text);
// host:port. With `optional` also "none".
FlagValue Listen(std::string ServeOptions::*field, bool optional);
FlagValue PageSize(int64_t ServeOptions::*field);
FlagValue PolicyName(std::string ServeOptions::*field);
FlagValue Weights(WeightPlan ServeOptions::*field);
FlagValue OutlierThreshold(std::optional<float> ServeOptions::*field);
FlagValue Sha256Digits(std::string ServeOptions::*field);
FlagValue FolderAndSize(FolderSpace ServeOptions::*field);
FlagValue SpeculateValue();  // a word, draft:MODEL, or auto

// Lists: words with commas between them, or one flag for each.
using Words = std::vector<std::string>;
FlagValue WorkerAddresses(Words ServeOptions::*field);
FlagValue ModelNames(Words ServeOptions::*field);
FlagValue Loras(Words ServeOptions::*field);
// Origins as browsers send them: no path, no slash at the end, lower case.
FlagValue Origins(Words ServeOptions::*field);

// The error for a value that is none of `words`, and their schema.
absl::Status ExpectedOneOf(const std::vector<std::string_view>& words, const std::string& text);
std::string EnumSchema(const std::vector<std::string_view>& words);
std::string EnumType(const std::vector<std::string_view>& words);

template <typename T, size_t N>
FlagValue OneOf(T ServeOptions::*field, const Choice<T> (&choices)[N]) {
  std::vector<std::string_view> words;
  for (const Choice<T>& choice : choices) words.push_back(choice.word);
  const auto parse = [words, &choices](const std::string& text) -> absl::StatusOr<T> {
    const std::optional<T> value = ValueOf(choices, text);
    if (!value) return ExpectedOneOf(words, text);
    return *value;
  };
  const auto show = [&choices](const T& value) { return std::string(WordOf(choices, value)); };
  return Value<T>(field, parse, show, EnumSchema(words), EnumType(words));
}

// "512", "64K", "100M", "2G", "1.5G" (powers of 1024) and "30s", "500ms", "2m".
absl::StatusOr<int64_t> ParseSize(const std::string& text);
absl::StatusOr<std::chrono::milliseconds> ParseDuration(const std::string& text);
std::string ShowBytes(int64_t bytes);  // "512M", or a plain number

}  // namespace treadle
