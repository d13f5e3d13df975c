#include "server/flag_values.h"

#include <charconv>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "base/status.h"

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

ReadFlag ReadInteger(int64_t ServeOptions::*field, int64_t low, int64_t high) {
  return [=](ServeOptions& options, const std::string& text) {
    int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end || value < low || value > high) {
      return InvalidArgument("is '", text, "', expected a whole number from ", low, " to ", high);
    }
    options.*field = value;
    return absl::OkStatus();
  };
}
ShowFlag ShowInteger(int64_t ServeOptions::*field, std::string if_zero) {
  return [=](const ServeOptions& options) {
    return options.*field == 0 ? if_zero : std::to_string(options.*field);
  };
}

ReadFlag ReadText(std::string ServeOptions::*field) {
  return [=](ServeOptions& options, const std::string& text) {
    options.*field = text;
    return absl::OkStatus();
  };
}
ShowFlag ShowText(std::string ServeOptions::*field) {
  return [=](const ServeOptions& options) {
    return (options.*field).empty() ? "none" : options.*field;
  };
}

ReadFlag ReadChoice(std::string ServeOptions::*field, std::vector<std::string> choices) {
  return [=](ServeOptions& options, const std::string& text) {
    std::string all;
    for (const std::string& choice : choices) {
      if (choice == text) {
        options.*field = text;
        return absl::OkStatus();
      }
      all += (all.empty() ? "" : " or ") + choice;
    }
    return InvalidArgument("is '", text, "', expected ", all);
  };
}

ReadFlag ReadDuration(std::chrono::milliseconds ServeOptions::*field) {
  return [=](ServeOptions& options, const std::string& text) {
    auto parsed = ParseDuration(text);
    if (parsed.ok()) options.*field = *parsed;
    return parsed.status();
  };
}
ShowFlag ShowDuration(std::chrono::milliseconds ServeOptions::*field) {
  return [=](const ServeOptions& options) {
    const int64_t ms = (options.*field).count();
    return ms % 1000 == 0 ? Str(ms / 1000, "s") : Str(ms, "ms");
  };
}

ReadFlag ReadSwitch(bool ServeOptions::*field) {
  return [=](ServeOptions& options, const std::string& text) {
    if (text != "on" && text != "off") {
      return InvalidArgument("is '", text, "', expected on or off");
    }
    options.*field = text == "on";
    return absl::OkStatus();
  };
}
ShowFlag ShowSwitch(bool ServeOptions::*field) {
  return [=](const ServeOptions& options) { return options.*field ? "on" : "off"; };
}

std::string ShowBytes(int64_t bytes) {
  constexpr int64_t kMebi = 1 << 20;
  return bytes % kMebi == 0 ? Str(bytes / kMebi, "M") : std::to_string(bytes);
}

}  // namespace treadle
