// Progress of long work: on stderr a bar on a terminal, else a line per quarter; or events of a
// log.
//
// Thread safety: one call at a time, from any thread.
#pragma once

#include <functional>
#include <string>

#include "server/observe/log_event.h"

namespace treadle {

// To be told how much is done, 0 to 1. A bar's line ends with the work, or with the last copy of
// this. With a `log`, an event "loading" per quarter goes there instead.
std::function<void(double)> ShowProgress(std::string what, LogSink log = {});

}  // namespace treadle
