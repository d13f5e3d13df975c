// treadle top: a running server, live, in a terminal; or lines, or JSON, for whatever reads them.
#include <CLI/CLI.hpp>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "base/status.h"
#include "server/cli/client_flags.h"
#include "server/cli/command.h"
#include "server/cli/top/top_terminal.h"
#include "server/cli/top/top_view.h"
#include "server/cli/top/top_watch.h"
#include "server/configuration.h"
#include "server/flag_values.h"

namespace treadle {
namespace {

constexpr std::chrono::milliseconds kShortestInterval{100};
constexpr std::chrono::milliseconds kLongestInterval = std::chrono::minutes{10};

struct TopOptions {
  std::string target = "127.0.0.1:50051";
  ClientFlags access;
  std::string interval = "1s";
  bool once = false;
  bool json = false;
};

void AddFlags(CLI::App& app, TopOptions& o) {
  app.add_option("--target", o.target, "server, host:port")->capture_default_str();
  AddClientFlags(app, o.access);
  app.add_option("--interval", o.interval, "between two updates, 100ms to 10m")
      ->capture_default_str();
  app.add_flag("--once", o.once, "one interval, then end");
  app.add_flag("--json", o.json, "one JSON object per interval");
}

absl::StatusOr<TopWatch::Options> WatchOptions(const TopOptions& o) {
  const auto interval = ParseDuration(o.interval);
  if (!interval.ok()) {
    return InvalidArgument("--interval ", std::string(interval.status().message()));
  }
  if (*interval < kShortestInterval || *interval > kLongestInterval) {
    return InvalidArgument("--interval is '", o.interval, "', expected 100ms to 10m");
  }
  TREADLE_ASSIGN_OR_RETURN(ClientAccess access, OpenAccess(o.access));
  return TopWatch::Options{
      .target = o.target, .access = std::move(access), .interval = *interval, .retry = !o.once};
}

void Show(const TopReport& report, const TopOptions& o, TopTerminal& terminal) {
  const TopTerminal::Size size = TopTerminal::size();
  if (terminal.has_screen()) {
    terminal.Draw(TopScreen(report, size.width, size.height));
  } else if (report.numbers && report.numbers->seconds == 0) {
    // The first report covers no interval.
  } else if (o.json) {
    TopTerminal::Print(TopJson(report));
  } else if (o.once) {
    for (const std::string& line : TopScreen(report, size.width, size.height)) {
      TopTerminal::Print(line);
    }
  } else {
    TopTerminal::Print(TopLine(report));
  }
}

// Until somebody quits (OK), or no other try would help.
absl::Status Follow(const TopOptions& o) {
  TopTerminal terminal(/*screen=*/!o.once && !o.json);
  TREADLE_ASSIGN_OR_RETURN(TopWatch::Options options, WatchOptions(o));
  TopReport shown{.target = options.target,
                  .interval = options.interval,
                  .time = std::chrono::system_clock::now(),
                  .model = {},
                  .numbers = {},
                  .trouble = {},
                  .retry_in = {}};
  if (terminal.has_screen()) Show(shown, o, terminal);
  TopWatch watch(std::move(options));
  while (true) {
    switch (terminal.Wait(watch.news())) {
      case TopTerminal::Event::kQuit:
        return absl::OkStatus();
      case TopTerminal::Event::kRedraw:
        Show(shown, o, terminal);
        break;
      case TopTerminal::Event::kNews:
        if (auto report = watch.Take()) {
          shown = std::move(*report);
          if (!shown.trouble.ok() && !shown.retry_in) {
            return absl::Status(shown.trouble.code(),
                                Str(o.target, ": ", absl::StatusCodeToString(shown.trouble.code()),
                                    ": ", std::string(shown.trouble.message())));
          }
          Show(shown, o, terminal);
          if (o.once && shown.numbers->seconds > 0) return absl::OkStatus();
        }
        break;
    }
  }
}

}  // namespace

int RunTop(int argc, char** argv) {
  TopOptions options;
  CLI::App app("A running server, live: its load, iterations, and the requests that run longest.");
  app.footer(
      "Ends with q or Ctrl-C. Exit codes: 0 done; 1 no answer (with --once), or access "
      "denied; 2 wrong flags or files, or no Treadle server.");
  AddFlags(app, options);
  if (auto code = ParseFlags(app, "top", argc, argv)) return *code;
  return Finish("top", Follow(options));
}

}  // namespace treadle
