// treadle top: a running server, live, in a terminal; or lines, or JSON, for whatever reads them.
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/cli/client_flags.h"
#include "server/cli/command.h"
#include "server/cli/help/terminal.h"
#include "server/cli/top/top_view.h"
#include "server/cli/top/top_watch.h"
#include "server/configuration.h"
#include "server/flag_values.h"

namespace treadle {
namespace {

constexpr std::chrono::milliseconds kMinInterval{100};
constexpr std::chrono::milliseconds kMaxInterval = std::chrono::minutes{10};
constexpr std::chrono::milliseconds kMaxWindow = std::chrono::hours{1};

constexpr std::string_view kEnter = "\x1b[?1049h\x1b[?25l";  // alternate screen, no cursor
constexpr std::string_view kLeave = "\x1b[?25h\x1b[?1049l";
constexpr std::string_view kHome = "\x1b[H";
constexpr std::string_view kClearToEndOfLine = "\x1b[K";
constexpr std::string_view kClearBelow = "\x1b[J";

void WriteAll(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(STDOUT_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return;  // a terminal that went away says so in Wait, too
    text.remove_prefix(static_cast<size_t>(n));
  }
}

// Standard input and output: a screen that is redrawn in place if both sides are a terminal's, else
// plain lines; and what ends it.
//
// From the first Draw on it has the alternate screen, hides the cursor and reads keys as they come;
// the destructor, a stop (Ctrl-Z) and every signal that can be caught give all of it back.
// Construct before any other thread starts (gRPC starts some with the first object of its own), so
// that all inherit the mask.
class Terminal {
 public:
  // `screen`: to be redrawn if stdout is a terminal; false: lines in any case.
  explicit Terminal(bool screen)
      : screen_(screen && isatty(STDOUT_FILENO)), keys_(screen_ && isatty(STDIN_FILENO)) {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&set, signal);
    if (screen_) {
      for (const int signal : {SIGWINCH, SIGTSTP}) sigaddset(&set, signal);
    }
    pthread_sigmask(SIG_BLOCK, &set, &old_mask_);
    signal_fd_ = signalfd(-1, &set, SFD_CLOEXEC);
    TREADLE_CHECK(signal_fd_ >= 0);
    if (keys_) tcgetattr(STDIN_FILENO, &old_settings_);
  }
  ~Terminal() {
    Leave();
    close(signal_fd_);
    pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  bool has_screen() const { return screen_; }
  bool has_keys() const { return keys_; }

  // The size of stdout's terminal; 80 x 24 if it is none.
  static winsize Size() {
    winsize size{};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) {
      size = {.ws_row = 24, .ws_col = 80, .ws_xpixel = 0, .ws_ypixel = 0};
    }
    return size;
  }

  // Requires has_screen().
  void Draw(const std::vector<std::string>& lines) {
    Enter();
    std::string frame(kHome);
    for (size_t i = 0; i < lines.size(); ++i) {
      if (i > 0) frame += "\r\n";
      // Before the text: at the end of a full line it would take the last character.
      frame += kClearToEndOfLine;
      frame += lines[i];
    }
    // The same holds for what is below, from the next line's beginning.
    if (lines.size() < Size().ws_row) {
      frame += "\r\n";
      frame += kClearBelow;
    }
    WriteAll(frame);
  }

  enum class Event { kNews, kRedraw, kPause, kQuit };
  // Waits until `news` is readable, the screen must be drawn again, or somebody wants to quit: q,
  // SIGINT, SIGTERM, SIGHUP, or a terminal that went away.
  Event Wait(int news) {
    while (true) {
      // poll ignores negative descriptors.
      pollfd sources[] = {
          {signal_fd_, POLLIN, 0}, {keys_ ? STDIN_FILENO : -1, POLLIN, 0}, {news, POLLIN, 0}};
      if (poll(sources, 3, -1) < 0) continue;
      std::optional<Event> event;
      if (sources[0].revents != 0) event = TakeSignal();
      if (!event && sources[1].revents != 0) event = TakeKey();
      if (!event && sources[2].revents != 0) event = Event::kNews;
      if (event) return *event;
    }
  }

 private:
  void Enter() {
    if (std::exchange(entered_, true)) return;
    if (keys_) {
      termios settings = old_settings_;
      settings.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      tcsetattr(STDIN_FILENO, TCSANOW, &settings);
    }
    WriteAll(kEnter);
  }
  void Leave() {
    if (!std::exchange(entered_, false)) return;
    WriteAll(kLeave);
    if (keys_) tcsetattr(STDIN_FILENO, TCSANOW, &old_settings_);
  }
  std::optional<Event> TakeSignal() {
    signalfd_siginfo info;
    if (read(signal_fd_, &info, sizeof info) != sizeof info) return std::nullopt;
    const auto signal = static_cast<int>(info.ssi_signo);
    if (signal != SIGWINCH && signal != SIGTSTP) return Event::kQuit;
    if (signal == SIGTSTP) {
      Leave();
      raise(SIGSTOP);
    }
    return Event::kRedraw;
  }
  static std::optional<Event> TakeKey() {
    char keys[64];
    const ssize_t n = read(STDIN_FILENO, keys, sizeof keys);
    if (n < 0 && errno == EINTR) return std::nullopt;
    const std::string_view typed(keys, static_cast<size_t>(std::max<ssize_t>(n, 0)));
    if (n <= 0 || typed.find('q') != typed.npos) return Event::kQuit;
    if (typed.find('p') != typed.npos) return Event::kPause;
    return std::nullopt;
  }

  const bool screen_;
  const bool keys_;  // stdin is a terminal, too
  sigset_t old_mask_;
  termios old_settings_{};
  bool entered_ = false;
  int signal_fd_ = -1;
};

// A line, at once.
void Print(const std::string& line) {
  std::fputs((line + "\n").c_str(), stdout);
  std::fflush(stdout);
}

struct TopOptions {
  std::string target = "127.0.0.1:50051";
  ClientFlags access;
  std::string interval = "1s";
  std::string window = "1m";
  bool once = false;
  bool json = false;
};

void AddFlags(CLI::App& app, TopOptions& o) {
  app.add_option("--target", o.target, "server, host:port");
  AddClientFlags(app, o.access);
  app.add_option("--interval", o.interval, "time between two updates, 100ms to 10m");
  app.add_option("--window", o.window,
                 "time that percentiles are of, 0s to 1h; 0s: each interval alone");
  app.add_flag("--once", o.once, "one interval, then end");
  app.add_flag("--json", o.json, "one JSON object per interval");
}

absl::StatusOr<TopWatch::Options> WatchOptions(const TopOptions& o) {
  const auto interval = ParseDuration(o.interval);
  if (!interval.ok()) {
    return InvalidArgument("--interval ", interval.status().message());
  }
  if (*interval < kMinInterval || *interval > kMaxInterval) {
    return InvalidArgument("--interval is '", o.interval, "', expected 100ms to 10m");
  }
  const auto window = ParseDuration(o.window);
  if (!window.ok()) return InvalidArgument("--window ", window.status().message());
  if (*window > kMaxWindow) {
    return InvalidArgument("--window is '", o.window, "', expected 0s to 1h");
  }
  TREADLE_ASSIGN_OR_RETURN(ClientAccess access, OpenAccess(o.access));
  return TopWatch::Options{.target = o.target,
                           .access = std::move(access),
                           .interval = *interval,
                           .window = *window,
                           .retry = !o.once};
}

void Show(const TopReport& report, const TopOptions& o, Terminal& terminal, bool paused = false) {
  const winsize size = Terminal::Size();
  if (terminal.has_screen()) {
    terminal.Draw(TopScreen(report, size.ws_col, size.ws_row,
                            {.colours = HasColours(STDOUT_FILENO),
                             .blocks = SpeaksUtf8(),
                             .keys = terminal.has_keys(),
                             .paused = paused}));
  } else if (report.numbers && report.numbers->seconds == 0) {
    // The first report covers no interval.
  } else if (o.json) {
    Print(TopJson(report));
  } else if (o.once) {
    for (const std::string& line : TopScreen(report, size.ws_col, size.ws_row)) Print(line);
  } else {
    Print(TopLine(report));
  }
}

// Until somebody quits (OK), or no other try would help.
absl::Status Follow(const TopOptions& o) {
  Terminal terminal(/*screen=*/!o.once && !o.json);
  TREADLE_ASSIGN_OR_RETURN(TopWatch::Options options, WatchOptions(o));
  TopReport shown{.target = options.target, .interval = options.interval};
  if (terminal.has_screen()) Show(shown, o, terminal);
  TopWatch watch(std::move(options));
  bool paused = false;
  while (true) {
    switch (terminal.Wait(watch.news())) {
      case Terminal::Event::kQuit:
        return absl::OkStatus();
      case Terminal::Event::kPause:
        paused = !paused;
        [[fallthrough]];
      case Terminal::Event::kRedraw:
        Show(shown, o, terminal, paused);
        break;
      case Terminal::Event::kNews:
        if (auto report = watch.Take()) {
          if (paused && report->trouble.ok()) break;
          shown = std::move(*report);
          if (!shown.trouble.ok() && !shown.retry_in) {
            return absl::Status(shown.trouble.code(),
                                Str(o.target, ": ", shown.trouble.ToString()));
          }
          Show(shown, o, terminal, paused);
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
