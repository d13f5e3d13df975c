// Log events with a name that stays, fields, and a sentence for people; as a
// line of text or of JSON.
//
// Pure; any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "base/choice.h"

namespace treadle {

enum class Severity : uint8_t { kInfo, kWarning, kError };
enum class LogFormat : uint8_t { kText, kJson };

inline constexpr Choice<Severity> kSeverities[] = {
    {"info", Severity::kInfo}, {"warning", Severity::kWarning}, {"error", Severity::kError}};
inline constexpr Choice<LogFormat> kLogFormats[] = {{"text", LogFormat::kText},
                                                    {"json", LogFormat::kJson}};

struct LogField {
  std::string key;  // snake_case
  std::variant<std::string, int64_t, double> value;
};

struct LogEvent {
  // The parts that a line of text shows.
  enum class Text : uint8_t {
    kMessage,           // the sentence
    kMessageAndFields,  // the sentence key=value key="other value"
    kFieldLines,        // a line "key = value" for each field
  };
  Severity severity = Severity::kInfo;
  std::string name = {};     // snake_case; programs look for it, so it never changes
  std::string message = {};  // no prompt, no answer, no secret; neither in the fields
  std::vector<LogField> fields = {};
  Text text = Text::kMessage;
  absl::Time time = absl::InfinitePast();  // unset: when it is written down
};

// Where events go; called on any thread, does not wait.
using LogSink = std::function<void(LogEvent)>;

// One line with its end, whatever the event holds: control characters are escaped. kFieldLines: one
// for each field.
std::string ToText(const LogEvent& event);
// One line with its end: {"time": RFC 3339 in UTC with microseconds, "severity", "event",
// "message", and the fields}. Bytes that are not UTF-8 become U+FFFD.
std::string ToJson(const LogEvent& event);
// The event of a line that ToJson made, with time; nothing if the line is something else.
std::optional<LogEvent> FromJson(const std::string& line);

}  // namespace treadle
