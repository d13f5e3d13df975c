#include "server/cli/log_flags.h"

#include <signal.h>

#include <CLI/CLI.hpp>

namespace treadle {

void AddLogFlags(CLI::App& app, LogFlags& flags) {
  app.add_option("--log-format", flags.format,
                 "lines of the log: text, or json with time, severity, event and fields")
      ->check(CLI::IsMember({"text", "json"}));
  app.add_option("--log-level", flags.level, "log what is at least this: info, warning or error")
      ->check(CLI::IsMember({"info", "warning", "error"}));
  app.add_option(
      "--log-file", flags.file,
      "append the log to this file, opened anew when it was renamed; without it: stderr");
}

absl::StatusOr<std::unique_ptr<Log>> OpenLog(const LogFlags& flags) {
  if (!flags.file.empty()) signal(SIGHUP, SIG_IGN);
  return Log::Open({.format = flags.format == "json" ? LogFormat::kJson : LogFormat::kText,
                    .level = SeverityNamed(flags.level).value_or(Severity::kInfo),
                    .file = flags.file});
}

}  // namespace treadle
