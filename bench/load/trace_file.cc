#include "bench/load/trace_file.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/number.h"
#include "base/status.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

// Seconds; either a number or "YYYY-MM-DD HH:MM:SS.fraction", in UTC unless it says otherwise.
std::optional<double> TimeIn(std::string text) {
  std::optional<double> seconds = NumberIn<double>(text);
  std::ranges::replace(text, 'T', ' ');
  for (const char* format : {"%Y-%m-%d %H:%M:%E*S", "%Y-%m-%d %H:%M:%E*S%Ez"}) {
    absl::Time time;
    if (seconds || !absl::ParseTime(format, text, &time, nullptr)) continue;
    seconds = absl::ToDoubleSeconds(time - absl::UnixEpoch());
  }
  return seconds && std::isfinite(*seconds) ? seconds : std::nullopt;  // Abseil knows a future
}

// A number of tokens as the file has it.
absl::StatusOr<int32_t> TokensIn(const char* name, std::optional<double> number,
                                 std::string_view found) {
  if (number && *number == std::floor(*number) && *number >= 0 && *number <= kMaxTokens) {
    return static_cast<int32_t>(*number);
  }
  return InvalidArgument(name, " is '", std::string(found.substr(0, 80)),
                         "', expected a whole number from 0 to ", kMaxTokens);
}

// The columns of a format.
struct Columns {
  struct Names {
    const char *time, *input, *output;
  } names;
  size_t time, input, output;
};

// Tells which of the two known headers this is.
absl::StatusOr<Columns> FindColumns(const std::string& header) {
  static constexpr Columns::Names kKnown[] = {{"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
                                              {"Timestamp", "Request tokens", "Response tokens"}};
  const std::vector<std::string> names = absl::StrSplit(header, ',');
  auto index = [&](const char* name) {
    return static_cast<size_t>(std::ranges::find(names, name) - names.begin());
  };
  for (const Columns::Names& known : kKnown) {
    const Columns columns{known, index(known.time), index(known.input), index(known.output)};
    if (std::max({columns.time, columns.input, columns.output}) < names.size()) return columns;
  }
  return InvalidArgument(
      "expected a JSON object, an array of conversations, or a CSV header with TIMESTAMP,"
      "ContextTokens,GeneratedTokens or Timestamp,Request tokens,Response tokens; found '",
      header.substr(0, 80), "'");
}

absl::StatusOr<TraceEntry> ReadCsvLine(const Columns& columns, const std::string& line) {
  const std::vector<std::string> fields = absl::StrSplit(line, ',');
  const size_t last = std::max({columns.time, columns.input, columns.output});
  if (fields.size() <= last) {
    return InvalidArgument("it has ", fields.size(), " columns, expected at least ", last + 1);
  }
  const std::optional<double> time = TimeIn(fields[columns.time]);
  if (!time) {
    return InvalidArgument(columns.names.time, " is '", fields[columns.time].substr(0, 80),
                           "', expected seconds or YYYY-MM-DD HH:MM:SS");
  }
  TraceEntry entry{*time};
  const auto tokens = [&](const char* name, size_t column) {
    return TokensIn(name, NumberIn<double>(fields[column]), fields[column]);
  };
  TREADLE_ASSIGN_OR_RETURN(entry.input_tokens, tokens(columns.names.input, columns.input));
  TREADLE_ASSIGN_OR_RETURN(entry.output_tokens, tokens(columns.names.output, columns.output));
  return entry;
}

absl::StatusOr<TraceEntry> ReadJsonLine(const std::string& line) {
  const Json object = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return InvalidArgument("it is no JSON object");
  const auto number = [&](const char* name) -> std::optional<double> {
    if (!object.contains(name) || !object[name].is_number()) return std::nullopt;
    return object[name].get<double>();
  };
  const auto shown = [&](const char* name) {
    return object.contains(name) ? object[name].dump() : std::string("missing");
  };
  TraceEntry entry;
  const std::optional<double> time = number("timestamp");
  if (!time) return InvalidArgument("timestamp is '", shown("timestamp"), "', expected a number");
  entry.arrival = *time / 1000;
  for (const auto& [name, to] : {std::pair("input_length", &entry.input_tokens),
                                 std::pair("output_length", &entry.output_tokens)}) {
    TREADLE_ASSIGN_OR_RETURN(*to, TokensIn(name, number(name), shown(name)));
  }
  if (!object.contains("hash_ids")) return entry;
  const int64_t blocks = (int64_t{entry.input_tokens} + kBlockTokens - 1) / kBlockTokens;
  const Json& ids = object["hash_ids"];
  const bool numbers = ids.is_array() && std::all_of(ids.begin(), ids.end(), [](const Json& id) {
                         return id.is_number_integer();
                       });
  if (!numbers || std::ssize(ids) != blocks) {
    return InvalidArgument("hash_ids: expected a whole number for each of ", blocks, " blocks of ",
                           kBlockTokens, " tokens");
  }
  entry.blocks = ids.get<std::vector<int64_t>>();
  return entry;
}

// One request a line, with times.
absl::StatusOr<std::vector<TraceEntry>> ReadLines(std::istream& file, const std::string& path,
                                                  const TraceFileOptions& options) {
  std::vector<TraceEntry> trace;
  std::string line;
  std::optional<Columns> columns;
  double last = -INFINITY;
  std::optional<double> first;
  for (int64_t number = 1; std::getline(file, line); ++number) {
    const auto wrong = [&](std::string_view why) {
      return InvalidArgument(path, " line ", number, ": ", why);
    };
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    if (number == 1 && line[0] != '{') {
      const absl::StatusOr<Columns> found = FindColumns(line);
      if (!found.ok()) return wrong(std::string(found.status().message()));
      columns = *found;
      continue;
    }
    absl::StatusOr<TraceEntry> entry = columns ? ReadCsvLine(*columns, line) : ReadJsonLine(line);
    if (!entry.ok()) return wrong(std::string(entry.status().message()));
    if (entry->arrival < last) {
      return wrong(Str("time goes backwards, by ", last - entry->arrival, " s"));
    }
    last = entry->arrival;
    if (entry->input_tokens == 0 || entry->output_tokens == 0) continue;
    if (!first) first = entry->arrival;
    entry->arrival = (entry->arrival - *first) * options.time_scale;
    trace.push_back(*std::move(entry));
    if (options.limit > 0 && std::ssize(trace) == options.limit) break;
  }
  return trace;
}

// One conversation: what a human says and the answer to it is a turn. It ends where either has no
// tokens.
class Conversation {
 public:
  Conversation(const TraceFileOptions& options, TraceRandom& random, std::vector<TraceEntry>& trace)
      : options_(options), random_(random), trace_(trace) {}

  absl::Status Read(const Json& entry) {
    if (!entry.is_object() || !entry.contains("conversations") ||
        !entry["conversations"].is_array()) {
      return InvalidArgument("it has no list of conversations");
    }
    for (const Json& message : entry["conversations"]) {
      TREADLE_ASSIGN_OR_RETURN(const bool goes_on, ReadMessage(message));
      if (!goes_on) break;
    }
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<bool> ReadMessage(const Json& message) {
    if (!message.is_object() || !message.contains("from") || !message["from"].is_string() ||
        !message.contains("value") || !message["value"].is_string()) {
      return InvalidArgument("a message without the texts from and value");
    }
    static constexpr std::string_view kAsks[] = {"human", "user", "system"};
    static constexpr std::string_view kAnswers[] = {"gpt", "chatgpt", "assistant", "bard", "bing"};
    const auto& from = message["from"].get_ref<const std::string&>();
    const bool answers = std::ranges::find(kAnswers, from) != std::end(kAnswers);
    if (!answers && std::ranges::find(kAsks, from) == std::end(kAsks)) {
      return InvalidArgument("a message is from '", from.substr(0, 80),
                             "', expected human, gpt or system");
    }
    TREADLE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                             options_.encode(message["value"].get_ref<const std::string&>()));
    if (!answers) {
      said_.insert(said_.end(), ids.begin(), ids.end());
      return true;
    }
    if (said_.empty() && last_ < 0) return true;  // some begin with an answer, cut off as they are
    const bool full = options_.limit > 0 && std::ssize(trace_) >= options_.limit;
    if (said_.empty() || ids.empty() || full) return false;
    TraceEntry turn;
    int64_t before = 0;
    if (last_ >= 0) {
      const TraceEntry& earlier = trace_[static_cast<size_t>(last_)];
      before = int64_t{earlier.input_tokens} + earlier.output_tokens;
      turn.arrival = -std::log(1 - random_.Uniform()) * options_.think_time;
      turn.after = last_;
    }
    if (before + std::ssize(said_) > kMaxTokens) return InvalidArgument("it is too long");
    turn.input_tokens = static_cast<int32_t>(before + std::ssize(said_));
    turn.output_tokens = static_cast<int32_t>(ids.size());
    turn.token_ids = std::exchange(said_, {});
    last_ = std::ssize(trace_);
    trace_.push_back(std::move(turn));
    return true;
  }

  const TraceFileOptions& options_;
  TraceRandom& random_;
  std::vector<TraceEntry>& trace_;
  std::vector<int32_t> said_;  // since the last answer
  int64_t last_ = -1;          // turn
};

absl::StatusOr<std::vector<TraceEntry>> ReadConversations(std::istream& file,
                                                          const std::string& path,
                                                          const TraceFileOptions& options) {
  if (!options.encode) {
    return InvalidArgument(path,
                           " has conversations: give --tokenizer, so that its texts become "
                           "tokens");
  }
  Json list;
  try {
    list = Json::parse(file);
  } catch (const Json::parse_error& error) {
    return InvalidArgument(path, ": ", error.what());  // line and column
  }
  std::vector<TraceEntry> trace;
  TraceRandom random(options.seed);
  for (size_t i = 0; i < list.size(); ++i) {
    const absl::Status read = Conversation(options, random, trace).Read(list[i]);
    if (!read.ok()) {
      return InvalidArgument(path, " conversation ", i + 1, ": ", std::string(read.message()));
    }
    if (options.limit > 0 && std::ssize(trace) >= options.limit) break;
  }
  return trace;
}

}  // namespace

absl::StatusOr<std::vector<TraceEntry>> ReadTrace(const std::string& path,
                                                  const TraceFileOptions& options) {
  std::ifstream file(path);
  if (!file) return NotFound(path, ": cannot be opened");
  TREADLE_ASSIGN_OR_RETURN(
      std::vector<TraceEntry> trace,
      file.peek() == '[' ? ReadConversations(file, path, options) : ReadLines(file, path, options));
  if (trace.empty()) return InvalidArgument(path, ": no request in it");
  return trace;
}

}  // namespace treadle
