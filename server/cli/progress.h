// Progress of long work: on stderr a bar on a terminal, else a line per quarter; or events of a
// log.
//
// Thread safety: none; Set from one thread.
#pragma once

#include <string>

#include "server/observe/log_event.h"

namespace treadle {

class Progress {
 public:
  // With a `log`, an event "loading" per quarter goes there instead.
  explicit Progress(std::string what, LogSink log = {});
  ~Progress();  // ends the bar's line

  void Set(double fraction);  // 0 to 1

 private:
  void Tell(int percent);

  const std::string what_;
  const LogSink log_;
  const bool terminal_;
  int shown_ = -1;  // percent on a terminal, quarters in a log
};

}  // namespace treadle
