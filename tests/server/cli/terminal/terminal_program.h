// A program with its input and output in a terminal of a given size, or its output in a pipe. Every
// wait is bounded. Not thread-safe.
#pragma once

#include <sys/ioctl.h>
#include <termios.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace treadle {

class TerminalProgram {
 public:
  static constexpr std::chrono::seconds kPatience{60};

  // No size: a pipe, and nothing to read from. The environment is this process's.
  TerminalProgram(std::vector<std::string> command, std::optional<winsize> size);
  ~TerminalProgram();
  TerminalProgram(const TerminalProgram&) = delete;
  TerminalProgram& operator=(const TerminalProgram&) = delete;

  const std::string& output() const { return output_; }  // all that was read
  void Signal(int signal) const;
  void Type(const std::string& keys) const;
  void Resize(winsize size) const;
  bool ReadsKeysAsTheyAreTyped() const;

  template <typename Enough>
  bool WaitFor(const Enough& enough) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!enough(output_)) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      Read(50);
    }
    return true;
  }
  // `from`: where in the output it begins to look.
  bool WaitForText(const std::string& text, size_t from = 0);
  // How it ended or stopped, as waitpid has it; nothing if it goes on.
  std::optional<int> WaitForChange();
  // The exit code; -1 if it did not exit.
  int WaitForExit();

 private:
  bool Read(int milliseconds);

  int pid_ = -1;
  int output_fd_ = -1;  // a terminal's other side takes keys, too
  int theirs_ = -1;     // kept open, so that a terminal can be looked at after the program's end
  std::string output_;
};

}  // namespace treadle
