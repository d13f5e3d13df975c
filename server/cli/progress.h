// Progress of long work on stderr: a bar on a terminal, a line per quarter in a log.
//
// Thread safety: none; Set from one thread.
#pragma once

#include <string>

namespace treadle {

class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();  // ends the bar's line

  void Set(double fraction);  // 0 to 1

 private:
  const std::string what_;
  const bool terminal_;
  int shown_ = -1;  // percent on a terminal, quarters in a log
};

}  // namespace treadle
