// How `treadle top` shows a server: a screen, a line, or JSON. Pure functions. Screen and line are
// printable ASCII, but for the colours and blocks of a TopStyle, whatever a server says of itself:
// its model's name is not ours, and a terminal obeys escape codes.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/cli/top/top_state.h"

namespace treadle {

struct TopModel {
  std::string name, architecture, backend, version, sha256;
  int64_t parameters = 0;
  int32_t max_context = 0;
};

struct TopReport {
  std::string target;
  std::chrono::milliseconds interval{0};  // as asked
  std::chrono::system_clock::time_point time = std::chrono::system_clock::now();
  TopModel model = {};                     // as last said; empty before
  std::optional<TopNumbers> numbers = {};  // nothing: see `trouble`
  absl::Status trouble = {};
  std::optional<std::chrono::milliseconds> retry_in = {};  // with trouble; nothing: it gives up
};

struct TopStyle {
  bool colours = false;
  bool blocks = false;  // of Unicode, for histories
  bool keys = false;    // the last line says which keys there are
  bool paused = false;
};

// At most `height` lines of at most `width` characters.
std::vector<std::string> TopScreen(const TopReport& report, int width, int height,
                                   const TopStyle& style = {});
// Both without a newline at their end.
std::string TopLine(const TopReport& report);
std::string TopJson(const TopReport& report);

}  // namespace treadle
