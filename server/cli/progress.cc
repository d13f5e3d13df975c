#include "server/cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr int kBarWidth = 30;

class Progress {
 public:
  Progress(std::string what, LogSink log)
      : what_(std::move(what)), log_(std::move(log)), terminal_(!log_ && isatty(STDERR_FILENO)) {}
  ~Progress() {
    if (terminal_ && shown_ >= 0 && shown_ < 100) std::fputc('\n', stderr);
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Set(double fraction) {
    const int percent = static_cast<int>(100 * std::clamp(fraction, 0.0, 1.0));
    const int step = terminal_ ? percent : percent / 25;
    if (step <= shown_) return;
    shown_ = step;
    if (terminal_) return Draw(percent);
    if (step == 0) return;
    const std::string line = Str(what_, ": ", step * 25, "%");
    if (log_) {
      log_({.name = "loading", .message = line, .fields = {{"percent", int64_t{step} * 25}}});
    } else {
      std::fprintf(stderr, "%s\n", line.c_str());
    }
  }

 private:
  void Draw(int percent) const {
    const int filled = kBarWidth * percent / 100;
    std::fprintf(stderr, "\r%s [%s%s] %3d%%%s", what_.c_str(), std::string(filled, '#').c_str(),
                 std::string(kBarWidth - filled, ' ').c_str(), percent, percent == 100 ? "\n" : "");
    std::fflush(stderr);
  }

  const std::string what_;
  const LogSink log_;
  const bool terminal_;
  int shown_ = -1;  // percent on a terminal, quarters in a log
};

}  // namespace

std::function<void(double)> ShowProgress(std::string what, LogSink log) {
  return [progress = std::make_shared<Progress>(std::move(what), std::move(log))](double fraction) {
    progress->Set(fraction);
  };
}

}  // namespace treadle
