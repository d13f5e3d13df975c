#include "server/observe/log_event.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "base/utf8.h"

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kTime[] = "%Y-%m-%dT%H:%M:%E6SZ";
// Keys that every line has; the others are fields.
constexpr std::array<const char*, 4> kOwnKeys = {"time", "severity", "event", "message"};

std::string Show(const LogField& field) {
  return std::visit([](const auto& value) { return Str(value); }, field.value);
}

// As it is if it is one word, else in quotes.
void AppendValue(const LogField& field, std::string& out) {
  const std::string value = Show(field);
  if (!value.empty() && value.find_first_of(" \"=\\") == value.npos && Printable(value) == value) {
    out += value;
    return;
  }
  std::string escaped;
  for (const char c : value) {
    if (c == '"' || c == '\\') escaped += '\\';
    escaped += c;
  }
  out += '"' + Printable(escaped) + '"';
}

std::variant<std::string, int64_t, double> ValueOf(const Json& json) {
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number()) return json.get<double>();
  return json.is_string() ? json.get<std::string>() : json.dump();
}

}  // namespace

std::string ToText(const LogEvent& event) {
  std::string out;
  if (event.text == LogEvent::Text::kFieldLines) {
    for (const LogField& field : event.fields) {
      out += Printable(Str(field.key, " = ", Show(field))) + '\n';
    }
    return out;
  }
  out += Printable(event.message);
  if (event.text == LogEvent::Text::kMessageAndFields) {
    for (const LogField& field : event.fields) {
      out += ' ' + field.key + '=';
      AppendValue(field, out);
    }
  }
  out += '\n';
  return out;
}

std::string ToJson(const LogEvent& event) {
  Json json;
  json["time"] = absl::FormatTime(kTime, event.time, absl::UTCTimeZone());
  json["severity"] = WordOf(kSeverities, event.severity);
  json["event"] = event.name;
  json["message"] = event.message;
  for (const LogField& field : event.fields) {
    std::visit([&](const auto& value) { json[field.key] = value; }, field.value);
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::optional<LogEvent> FromJson(const std::string& line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  for (const char* key : kOwnKeys) {
    if (!json.contains(key) || !json[key].is_string()) return std::nullopt;
  }
  LogEvent event;
  const auto severity = ValueOf(kSeverities, json["severity"].get<std::string>());
  if (!severity ||
      !absl::ParseTime(absl::RFC3339_full, json["time"].get<std::string>(), &event.time, nullptr)) {
    return std::nullopt;
  }
  event.severity = *severity;
  event.name = json["event"].get<std::string>();
  event.message = json["message"].get<std::string>();
  for (const auto& [key, value] : json.items()) {
    if (std::find(kOwnKeys.begin(), kOwnKeys.end(), key) != kOwnKeys.end()) continue;
    event.fields.push_back({key, ValueOf(value)});
  }
  return event;
}

}  // namespace treadle
