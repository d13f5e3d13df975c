#include "server/observe/log.h"

#include <cstdio>
#include <utility>

#include "absl/time/clock.h"
#include "base/status.h"

namespace treadle {
namespace {

constexpr size_t kMaxString = 4096;

void Cut(std::string& text) {
  if (text.size() > kMaxString) text.resize(kMaxString);
}

std::string Line(LogFormat format, LogEvent event) {
  if (event.time == absl::InfinitePast()) event.time = absl::Now();
  return format == LogFormat::kJson ? ToJson(event) : ToText(event);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Log>> Log::Open(const Options& options) {
  LineWriter::Options lines{.file = options.file,
                            .what = "log file",
                            .standard = options.standard,
                            .queue_bytes = options.queue_bytes,
                            .flush_timeout = options.flush_timeout};
  lines.missing = [format = options.format](int64_t missing) {
    return Line(format, {.severity = Severity::kWarning,
                         .name = "log_lines_dropped",
                         .message = Str(missing, " log lines were dropped"),
                         .fields = {{"lines", missing}}});
  };
  if (!options.file.empty()) {
    lines.failed = [format = options.format, file = options.file](const absl::Status& status) {
      return Line(format, {.severity = Severity::kWarning,
                           .name = "log_file_failed",
                           .message = Str(std::string(status.message()),
                                          "; lines are dropped until it can be written"),
                           .fields = {{"file", file}}});
    };
  }
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<LineWriter> writer, LineWriter::Open(std::move(lines)));
  return std::unique_ptr<Log>(new Log(options, std::move(writer)));
}

void Log::Write(LogEvent event) {
  if (event.severity < options_.level) return;
  Cut(event.message);
  for (LogField& field : event.fields) {
    if (auto* text = std::get_if<std::string>(&field.value)) Cut(*text);
  }
  lines_->Write(Line(options_.format, std::move(event)));
}

LogSink WarningsToStderr() {
  return [](const LogEvent& event) {
    if (event.severity >= Severity::kWarning) std::fputs(ToText(event).c_str(), stderr);
  };
}

}  // namespace treadle
