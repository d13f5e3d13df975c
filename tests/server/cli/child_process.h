// A program run as a child process, with its stdout and stderr in one pipe. It inherits the
// environment but for TREADLE_MODEL, which is the tests' own and would be `serve --model`. Not
// thread-safe.
#pragma once

#include <string>
#include <vector>

namespace treadle {

class ChildProcess {
 public:
  explicit ChildProcess(const std::vector<std::string>& command);
  ~ChildProcess();  // kills it if it still runs

  // Reads until a line contains `text`; that line, or "" if the output ended first.
  std::string WaitForLine(const std::string& text);
  void Signal(int signal) const;
  int pid() const { return pid_; }  // -1 once it was waited for
  // Reads to the end and waits. The exit code, or 256 + the signal that ended it.
  int Wait();
  const std::string& output() const { return output_; }  // all that was read
  // Asks it to end by SIGTERM; its exit code.
  int Stop();
  // Ends it by SIGKILL, and waits until it is gone.
  void Kill();

 private:
  bool Read();

  int pid_ = -1;
  int pipe_ = -1;
  std::string output_;
};

// Runs a command to its end, and gives what it said. Expects that it ends with `code`.
std::string RunToEnd(const std::vector<std::string>& command, int code = 0);

// The word behind `text`, up to a blank, comma or quote; "" if the line does not have that text.
std::string WordAfter(const std::string& line, const std::string& text);

// The processes whose parent it is, in order; or those of them that have died and were not waited
// for.
std::vector<int> ChildrenOf(int parent, bool dead = false);

}  // namespace treadle
