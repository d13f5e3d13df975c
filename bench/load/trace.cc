#include "bench/load/trace.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>

#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/number.h"
#include "base/status.h"

namespace treadle {
namespace {

// Uniform doubles and integers straight from the generator's bits: the standard library's
// distributions differ between implementations, and a trace must not.
double Uniform(std::mt19937_64& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }

int32_t UniformInteger(std::mt19937_64& random, const LengthRange& range) {
  const auto span = static_cast<uint64_t>(range.high - range.low + 1);
  return range.low + static_cast<int32_t>(random() % span);
}

double Normal(std::mt19937_64& random) {  // Box-Muller
  const double radius = std::sqrt(-2 * std::log(1 - Uniform(random)));
  return radius * std::cos(2 * M_PI * Uniform(random));
}

// Marsaglia and Tsang, "A simple method for generating gamma variables" (2000); scale 1.
double Gamma(std::mt19937_64& random, double shape) {
  if (shape < 1) return Gamma(random, shape + 1) * std::pow(1 - Uniform(random), 1 / shape);
  const double d = shape - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double x = Normal(random), root = 1 + c * x;
    if (root <= 0) continue;
    const double v = root * root * root;
    if (std::log(1 - Uniform(random)) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v;
  }
}

bool ParseNumber(std::string_view text, double& value) {
  value = NumberIn<double>(text).value_or(NAN);
  return std::isfinite(value);
}

int32_t Tokens(double count) { return static_cast<int32_t>(std::clamp(count, -1.0, 1e9)); }

// Seconds; either a number or "YYYY-MM-DD HH:MM:SS.fraction", in UTC unless it says otherwise.
bool ParseTime(std::string_view text, double& seconds) {
  if (ParseNumber(text, seconds)) return true;
  std::string copy(text);
  std::ranges::replace(copy, 'T', ' ');
  for (const char* format : {"%Y-%m-%d %H:%M:%E*S", "%Y-%m-%d %H:%M:%E*S%Ez"}) {
    absl::Time time;
    if (!absl::ParseTime(format, copy, &time, nullptr)) continue;
    seconds = absl::ToDoubleSeconds(time - absl::UnixEpoch());
    return std::isfinite(seconds);  // Abseil knows an infinite future
  }
  return false;
}

struct Columns {
  size_t time, input, output;
};

// Tells which of the two known headers this is.
absl::StatusOr<Columns> FindColumns(const std::string& path, const std::string& header) {
  struct Known {
    const char *time, *input, *output;
  };
  static constexpr Known kKnown[] = {{"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
                                     {"Timestamp", "Request tokens", "Response tokens"}};
  const std::vector<std::string> names = absl::StrSplit(header, ',');
  auto index = [&](const char* name) {
    return static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
  };
  for (const Known& known : kKnown) {
    const Columns columns{index(known.time), index(known.input), index(known.output)};
    if (std::max({columns.time, columns.input, columns.output}) < names.size()) return columns;
  }
  return InvalidArgument(
      path,
      " line 1: expected a JSON object, or a CSV header with TIMESTAMP,"
      "ContextTokens,GeneratedTokens or Timestamp,Request tokens,Response tokens; found '",
      header.substr(0, 80), "'");
}

absl::StatusOr<TraceEntry> ParseJsonLine(const std::string& line) {
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return InvalidArgument("not a JSON object");
  for (const char* key : {"timestamp", "input_length", "output_length"}) {
    if (!object.contains(key) || !object[key].is_number()) {
      return InvalidArgument("'", key, "' is missing or not a number");
    }
  }
  return TraceEntry{object["timestamp"].get<double>() / 1000,
                    Tokens(object["input_length"].get<double>()),
                    Tokens(object["output_length"].get<double>())};
}

absl::StatusOr<TraceEntry> ParseCsvLine(const Columns& columns, const std::string& line) {
  const std::vector<std::string> fields = absl::StrSplit(line, ',');
  TraceEntry entry;
  double input = 0, output = 0;
  if (fields.size() <= std::max({columns.time, columns.input, columns.output}) ||
      !ParseTime(fields[columns.time], entry.arrival) ||
      !ParseNumber(fields[columns.input], input) || !ParseNumber(fields[columns.output], output)) {
    return InvalidArgument("expected a time and two token counts, found '", line.substr(0, 80),
                           "'");
  }
  entry.input_tokens = Tokens(input);
  entry.output_tokens = Tokens(output);
  return entry;
}

}  // namespace

absl::StatusOr<LengthRange> ParseLengthRange(const std::string& text) {
  const size_t colon = text.find(':');
  const auto low = NumberIn<int32_t>(text.substr(0, colon));
  const auto high = colon == text.npos ? low : NumberIn<int32_t>(text.substr(colon + 1));
  if (low && high && 1 <= *low && *low <= *high && *high <= 1'000'000'000) {
    return LengthRange{*low, *high};
  }
  return InvalidArgument("length '", text, "': expected N or LOW:HIGH with 1 <= LOW <= HIGH");
}

std::vector<TraceEntry> MakeTrace(const SyntheticTrace& options) {
  std::mt19937_64 random(options.seed);
  std::vector<TraceEntry> trace;
  double time = 0;
  for (int64_t i = 0; i < options.num_requests; ++i) {
    TraceEntry entry;
    entry.arrival = time;
    entry.input_tokens = UniformInteger(random, options.input);
    entry.output_tokens = UniformInteger(random, options.output);
    trace.push_back(entry);
    if (options.request_rate > 0) {
      time += Gamma(random, options.burstiness) / (options.burstiness * options.request_rate);
    }
  }
  return trace;
}

absl::StatusOr<std::vector<TraceEntry>> ReadTrace(const std::string& path, double time_scale,
                                                  int64_t limit) {
  std::ifstream file(path);
  if (!file) return NotFound(path, ": cannot be opened");
  std::vector<TraceEntry> trace;
  std::string line;
  bool csv = false;
  Columns columns{};
  for (int64_t number = 1; std::getline(file, line); ++number) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    if (number == 1 && line[0] != '{') {
      TREADLE_ASSIGN_OR_RETURN(columns, FindColumns(path, line));
      csv = true;
      continue;
    }
    absl::StatusOr<TraceEntry> entry = csv ? ParseCsvLine(columns, line) : ParseJsonLine(line);
    if (!entry.ok()) {
      return InvalidArgument(path, " line ", number, ": ", entry.status().message());
    }
    const bool failed = entry->input_tokens < 1 || entry->output_tokens < 1;  // in the originals
    if (!failed) trace.push_back(*entry);
  }
  if (trace.empty()) return InvalidArgument(path, ": no request in it");
  std::ranges::stable_sort(trace, {}, &TraceEntry::arrival);
  if (limit > 0 && static_cast<int64_t>(trace.size()) > limit) trace.resize(limit);
  const double first = trace.front().arrival;
  for (TraceEntry& entry : trace) entry.arrival = (entry.arrival - first) * time_scale;
  return trace;
}

}  // namespace treadle
