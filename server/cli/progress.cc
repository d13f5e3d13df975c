#include "server/cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr int kBarWidth = 30;

}  // namespace

Progress::Progress(std::string what, LogSink log)
    : what_(std::move(what)), log_(std::move(log)), terminal_(!log_ && isatty(STDERR_FILENO)) {}

Progress::~Progress() {
  if (terminal_ && shown_ >= 0) std::fputc('\n', stderr);
}

void Progress::Tell(int percent) {
  const std::string line = Str(what_, ": ", percent, "%");
  if (!log_) {
    std::fprintf(stderr, "%s\n", line.c_str());
    return;
  }
  log_({.name = "loading", .message = line, .fields = {{"percent", int64_t{percent}}}});
}

void Progress::Set(double fraction) {
  const int percent = static_cast<int>(100 * std::clamp(fraction, 0.0, 1.0));
  const int step = terminal_ ? percent : percent / 25;
  if (step <= shown_) return;
  shown_ = step;
  if (!terminal_) {
    if (percent >= 25) Tell(step * 25);
    return;
  }
  const int filled = kBarWidth * percent / 100;
  std::fprintf(stderr, "\r%s [%s%s] %3d%%", what_.c_str(), std::string(filled, '#').c_str(),
               std::string(kBarWidth - filled, ' ').c_str(), percent);
  std::fflush(stderr);
}

}  // namespace treadle
