// Progress of long work: on a terminal one line of stderr, drawn again as it goes on; else one line
// at the end; or two events of a log.
//
// Thread safety: one call at a time, from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "server/observe/log_event.h"

namespace treadle {

// To be told how much is done, 0 to 1. `bytes`: of all the work; 0 if it is not one of bytes. A
// terminal's line ends with the work, or with the last copy of this. With a `log`, the events
// "loading" (at once) and "loaded" go there instead.
std::function<void(double)> ShowProgress(std::string what, uint64_t bytes = 0, LogSink log = {});

// The line that a terminal shows: what is done, how fast, and the time left; at most `width`
// columns, for which the bar makes room, then `what` behind its first word. `fraction` 1: what the
// whole work took.
std::string ProgressLine(const std::string& what, double fraction, uint64_t bytes, double seconds,
                         int width);

}  // namespace treadle
