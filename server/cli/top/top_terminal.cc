#include "server/cli/top/top_terminal.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

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

}  // namespace

TopTerminal::TopTerminal(bool screen)
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

TopTerminal::~TopTerminal() {
  Leave();
  close(signal_fd_);
  pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
}

void TopTerminal::Enter() {
  if (std::exchange(entered_, true)) return;
  if (keys_) {
    termios settings = old_settings_;
    settings.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
    tcsetattr(STDIN_FILENO, TCSANOW, &settings);
  }
  WriteAll(kEnter);
}

void TopTerminal::Leave() {
  if (!std::exchange(entered_, false)) return;
  WriteAll(kLeave);
  if (keys_) tcsetattr(STDIN_FILENO, TCSANOW, &old_settings_);
}

TopTerminal::Size TopTerminal::size() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) {
    return {};
  }
  return {size.ws_col, size.ws_row};
}

void TopTerminal::Draw(const std::vector<std::string>& lines) {
  Enter();
  std::string frame(kHome);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) frame += "\r\n";
    // Before the text: at the end of a full line it would take the last character.
    frame += kClearToEndOfLine;
    frame += lines[i];
  }
  // The same holds for what is below, from the next line's beginning.
  if (static_cast<int>(lines.size()) < size().height) {
    frame += "\r\n";
    frame += kClearBelow;
  }
  WriteAll(frame);
}

void TopTerminal::Print(const std::string& line) {
  std::fputs((line + "\n").c_str(), stdout);
  std::fflush(stdout);
}

std::optional<TopTerminal::Event> TopTerminal::TakeSignal() {
  signalfd_siginfo info;
  if (read(signal_fd_, &info, sizeof info) != sizeof info) return std::nullopt;
  switch (static_cast<int>(info.ssi_signo)) {
    case SIGWINCH:
      return Event::kRedraw;
    case SIGTSTP:
      Leave();
      raise(SIGSTOP);
      return Event::kRedraw;
    default:
      return Event::kQuit;
  }
}

std::optional<TopTerminal::Event> TopTerminal::TakeKey() {
  char keys[64];
  const ssize_t n = read(STDIN_FILENO, keys, sizeof keys);
  if (n < 0 && errno == EINTR) return std::nullopt;
  if (n <= 0) return Event::kQuit;
  const bool quit = std::string_view(keys, static_cast<size_t>(n)).find('q') != std::string::npos;
  return quit ? std::optional(Event::kQuit) : std::nullopt;
}

TopTerminal::Event TopTerminal::Wait(int news) {
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

}  // namespace treadle
