#include "server/cli/log_flags.h"

#include <signal.h>

#include <CLI/CLI.hpp>

#include "server/cli/command.h"

namespace treadle {

void AddLogFlags(CLI::App& app, Log::Options& options) {
  AddChoice(app, "--log-format", options.format, kLogFormats,
            "lines of the log: text, or json with time, severity, event and fields");
  AddChoice(app, "--log-level", options.level, kSeverities,
            "log what is at least this: info, warning or error");
  app.add_option(
      "--log-file", options.file,
      "append the log to this file, opened anew when it was renamed; without it: stderr");
}

absl::StatusOr<std::unique_ptr<Log>> OpenLog(const Log::Options& options) {
  if (!options.file.empty()) signal(SIGHUP, SIG_IGN);
  return Log::Open(options);
}

}  // namespace treadle
