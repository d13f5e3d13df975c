#include "server/flag_values.h"

#include <charconv>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <utility>

#include "base/number.h"
#include "base/status.h"
#include "net/address.h"

namespace treadle {
namespace {

struct Unit {
  const char* suffix;
  double factor;
};

// A number >= 0 with one of the units' suffixes.
absl::StatusOr<double> ParseWithUnit(const std::string& text, std::initializer_list<Unit> units,
                                     const char* expected) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  const std::string suffix(stop, end);
  for (const Unit& unit : units) {
    if (error == std::errc() && suffix == unit.suffix && std::isfinite(value) && value >= 0 &&
        value * unit.factor < 9e18) {
      return value * unit.factor;
    }
  }
  return InvalidArgument("is '", text, "', expected ", expected);
}

}  // namespace

absl::StatusOr<int64_t> ParseSize(const std::string& text) {
  TREADLE_ASSIGN_OR_RETURN(
      const double bytes,
      ParseWithUnit(text, {{"", 1}, {"K", 0x1p10}, {"M", 0x1p20}, {"G", 0x1p30}, {"T", 0x1p40}},
                    "a size such as 512M or 2G"));
  return static_cast<int64_t>(bytes);
}

absl::StatusOr<std::chrono::milliseconds> ParseDuration(const std::string& text) {
  TREADLE_ASSIGN_OR_RETURN(const double ms,
                           ParseWithUnit(text, {{"ms", 1}, {"s", 1e3}, {"m", 6e4}, {"h", 3.6e6}},
                                         "a time such as 30s, 500ms or 2m"));
  if (ms > 1e11) return InvalidArgument("is '", text, "', expected at most three years");
  return std::chrono::milliseconds(static_cast<int64_t>(ms));
}

FlagValue Integer(int64_t ServeOptions::*field, int64_t low, int64_t high, std::string zero) {
  const bool automatic = zero == "auto";
  const auto parse = [=](const std::string& text) -> absl::StatusOr<int64_t> {
    if (automatic && text == zero) return 0;
    const std::optional<int64_t> value = NumberIn<int64_t>(text);
    if (value && *value >= low && *value <= high) return *value;
    return InvalidArgument("is '", text, "', expected ", automatic ? "auto or " : "",
                           "a whole number from ", low, " to ", high);
  };
  const auto show = [zero](int64_t value) { return value == 0 ? zero : std::to_string(value); };
  return Value<int64_t>(
      field, parse, show,
      Str(R"({"type": "integer", "minimum": )", low, R"(, "maximum": )", high, "}"), "N");
}

FlagValue Size(int64_t ServeOptions::*field, int64_t low, int64_t high, std::string expected,
               std::string zero) {
  const bool automatic = zero == "auto";
  const auto parse = [=](const std::string& text) -> absl::StatusOr<int64_t> {
    if (automatic && text == zero) return 0;
    absl::StatusOr<int64_t> value = ParseSize(text);
    if (value.ok() && *value >= low && *value <= high) return value;
    return InvalidArgument("is '", text, "', expected ", automatic ? "auto or " : "", expected);
  };
  const auto show = [zero](int64_t value) { return value == 0 ? zero : ShowBytes(value); };
  std::string schema = R"({"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?[KMGT]?$"})";
  if (automatic) schema = Str(R"({"anyOf": [{"enum": ["auto"]}, )", schema, "]}");
  return Value<int64_t>(field, parse, show, std::move(schema), "SIZE");
}

FlagValue Duration(std::chrono::milliseconds ServeOptions::*field) {
  const auto show = [](std::chrono::milliseconds time) {
    const int64_t ms = time.count();
    return ms % 1000 == 0 ? Str(ms / 1000, "s") : Str(ms, "ms");
  };
  return Value<std::chrono::milliseconds>(
      field, ParseDuration, show,
      R"({"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(ms|s|m|h)$"})", "TIME");
}

std::string ShowText(const std::string& text) { return text.empty() ? "none" : text; }

FlagValue Text(std::string ServeOptions::*field, std::string schema) {
  const auto parse = [](const std::string& text) { return text; };
  return Value<std::string>(field, parse, ShowText, std::move(schema));
}

FlagValue Listen(std::string ServeOptions::*field, bool optional) {
  const auto parse = [optional](const std::string& text) -> absl::StatusOr<std::string> {
    if (optional && (text.empty() || text == "none")) return "none";
    TREADLE_RETURN_IF_ERROR(ParseAddress(text).status());
    return text;
  };
  return Value<std::string>(field, parse, ShowText, kAnyText, "ADDRESS");
}

absl::Status ExpectedOneOf(const std::vector<std::string_view>& words, const std::string& text) {
  std::string all;
  for (const std::string_view word : words) all += Str(all.empty() ? "" : " or ", word);
  return InvalidArgument("is '", text, "', expected ", all);
}

std::string EnumSchema(const std::vector<std::string_view>& words) {
  std::string all;
  for (const std::string_view word : words) all += Str(all.empty() ? "\"" : ", \"", word, "\"");
  return Str(R"({"enum": [)", all, "]}");
}

std::string EnumType(const std::vector<std::string_view>& words) {
  std::string all;
  for (const std::string_view word : words) all += Str(all.empty() ? "{" : ",", word);
  return all + "}";
}

std::string ShowBytes(int64_t bytes) {
  constexpr int64_t kMebi = 1 << 20;
  return bytes % kMebi == 0 ? Str(bytes / kMebi, "M") : std::to_string(bytes);
}

}  // namespace treadle
