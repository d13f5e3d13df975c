#include "server/cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "server/cli/help/terminal.h"

namespace treadle {
namespace {

using absl::StrFormat;
using Clock = std::chrono::steady_clock;

constexpr int kBarWidth = 20;
constexpr int kNoTerminal = 1 << 20;  // columns
constexpr std::chrono::milliseconds kRedraw{100};

std::string Bytes(double bytes) {
  return bytes < 1e9 ? StrFormat("%.1f MB", bytes / 1e6) : StrFormat("%.2f GB", bytes / 1e9);
}

std::string Span(double seconds) {
  if (seconds < 10) return StrFormat("%.1f s", seconds);
  const auto whole = static_cast<int64_t>(std::min(std::ceil(seconds), 1e9));
  if (whole < 100) return StrFormat("%d s", whole);
  return whole < 6000 ? StrFormat("%dm%02ds", whole / 60, whole % 60)
                      : StrFormat("%dh%02dm", whole / 3600, whole / 60 % 60);
}

class Progress {
 public:
  Progress(std::string what, uint64_t bytes, LogSink log)
      : what_(std::move(what)),
        bytes_(bytes),
        log_(std::move(log)),
        terminal_(!log_ && isatty(STDERR_FILENO)) {
    if (!log_) return;
    const std::string size = bytes_ > 0 ? ", " + Bytes(static_cast<double>(bytes_)) : "";
    log_({.name = "loading",
          .message = what_ + size,
          .fields = {{"bytes", static_cast<int64_t>(bytes_)}}});
  }
  ~Progress() {
    if (terminal_ && fraction_ > 0 && fraction_ < 1) std::fputc('\n', stderr);
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Set(double fraction) {
    fraction = std::clamp(fraction, 0.0, 1.0);
    const Clock::time_point now = Clock::now();
    const bool ends = fraction >= 1;
    if (fraction <= fraction_ || (!ends && (!terminal_ || now < drawn_ + kRedraw))) return;
    fraction_ = fraction;
    drawn_ = now;
    const double seconds = std::chrono::duration<double>(now - began_).count();
    const int width = terminal_ ? ColumnsOf(STDERR_FILENO, 80) - 1 : kNoTerminal;
    const std::string line = ProgressLine(what_, fraction, bytes_, seconds, width);
    if (log_) {
      log_({.name = "loaded",
            .message = line,
            .fields = {{"bytes", static_cast<int64_t>(bytes_)}, {"seconds", seconds}}});
    } else {
      std::fprintf(stderr, "%s%s%s", terminal_ ? "\r\x1b[K" : "", line.c_str(), ends ? "\n" : "");
      std::fflush(stderr);
    }
  }

 private:
  const std::string what_;
  const uint64_t bytes_;
  const LogSink log_;
  const bool terminal_;
  const Clock::time_point began_ = Clock::now();
  Clock::time_point drawn_;  // long ago
  double fraction_ = 0;      // as shown last
};

}  // namespace

std::string ProgressLine(const std::string& what, double fraction, uint64_t bytes, double seconds,
                         int width) {
  const double done = fraction * static_cast<double>(bytes);
  const std::string rate =
      bytes > 0 && seconds > 0 ? StrFormat(", %s/s", Bytes(done / seconds)) : "";
  std::string bar, rest;
  if (fraction >= 1) {
    rest = Str(": ", bytes > 0 ? Bytes(done) + " in " : "", Span(seconds), rate);
  } else {
    const int filled = static_cast<int>(kBarWidth * fraction);
    bar = " [" + std::string(filled, '#') + std::string(kBarWidth - filled, '.') + "]";
    rest = StrFormat(" %2.0f%%", std::floor(100 * fraction));
    if (bytes > 0) {
      rest += StrFormat(", %s of %s", Bytes(done), Bytes(static_cast<double>(bytes)));
    }
    rest += rate;
    if (fraction > 0) rest += ", " + Span(seconds * (1 - fraction) / fraction) + " left";
  }
  const auto columns = static_cast<size_t>(std::max(width, 0));
  if (what.size() + bar.size() + rest.size() <= columns) return what + bar + rest;
  if (what.size() + rest.size() <= columns) return what + rest;
  const std::string begin = what.substr(0, what.find(' ') + 1) + "...";
  const size_t taken = std::min(begin.size() + rest.size(), columns);
  return (begin + what.substr(what.size() - std::min(columns - taken, what.size())) + rest)
      .substr(0, columns);
}

std::function<void(double)> ShowProgress(std::string what, uint64_t bytes, LogSink log) {
  return [progress = std::make_shared<Progress>(std::move(what), bytes, std::move(log))](
             double fraction) { progress->Set(fraction); };
}

}  // namespace treadle
